"""Intervals over documents. A document is the unit: tokens of one document are not independent.

Every quality here is a ratio of sums, sum_m y_m / sum_m n_m, over M documents; its variance is the usual linearisation
(Cochran, Sampling Techniques, ch. 6): residuals y_m - q n_m. Shapes: G points, M documents.
"""

import numpy as np

CONFIDENCE = 0.95


def student_quantile(documents: int) -> float:
    """Half-width of a 95 % interval in standard errors, from that many documents."""
    from scipy.special import stdtrit

    return float(stdtrit(documents - 1, 0.5 + CONFIDENCE / 2))


def influence(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio [...], and what each document adds to its error, [..., M]. sums: [..., M]; counts: [M] or [..., M]."""
    total = counts.sum(axis=-1)
    ratio = np.asarray(sums.sum(axis=-1) / total)
    return ratio, (sums - ratio[..., None] * counts) / np.asarray(total)[..., None]


def standard_error(influences: np.ndarray, documents: int) -> np.ndarray:
    """Of figures with these influences, [...] from [..., M]; NaN below two documents."""
    if documents < 2:
        return np.full(influences.shape[:-1], np.nan)
    return np.asarray(np.sqrt(np.square(influences).sum(axis=-1) * documents / (documents - 1)))


def ratio_error(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and its standard error. sums: [..., M]; counts: [M] tokens. NaN error below two documents."""
    ratio, influences = influence(sums, counts)
    return ratio, standard_error(influences, int((counts > 0).sum()))


def mean_interval(sums: np.ndarray, counts: np.ndarray, *, bounded: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over tokens with a 95 % interval over documents.

    Args:
        sums: [..., M] per-document sums of the per-token outcome.
        counts: [M] tokens a document.
        bounded: outcomes lie in [0, 1]: Wilson's interval at the effective sample size, which stays inside [0, 1] and
            does not collapse when every document agrees.

    Returns:
        mean, low, high, each [...].
    """
    mean, error = ratio_error(sums, counts)
    documents = int((counts > 0).sum())
    if documents < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    z = student_quantile(documents)
    if not bounded:
        return mean, mean - z * error, mean + z * error
    spread = mean * (1 - mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        effective = np.where(error > 0, spread / np.square(error), documents)
    effective = np.clip(effective, 1, counts.sum())
    centre = (mean + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * np.sqrt(spread / effective + (z / (2 * effective)) ** 2)
    return mean, np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def paired_difference(first: np.ndarray, second: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """Difference of two means over the same tokens, paired by document, with a 95 % interval. All arrays [M]."""
    difference, error = ratio_error(first - second, counts)
    documents = int((counts > 0).sum())
    half = float(error) * student_quantile(documents) if documents > 1 else float("nan")
    return float(difference), float(difference) - half, float(difference) + half


def mean_of_documents(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over documents, each counting the same, with its 95 % interval. values: [M]."""
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    mean = float(values.mean())
    half = student_quantile(len(values)) * float(values.std(ddof=1)) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return mean, mean - half, mean + half


def shift(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """By how much one sample lies above another, with a 95 % interval, whatever their distribution: value, low, high.

    The Hodges-Lehmann estimate and the Mann-Whitney interval, by its normal approximation (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 4.2-4.3). NaN ends where the samples are too few for one.
    """
    from scipy.special import ndtri

    pairs = np.sort((first[:, None] - second[None, :]).ravel())
    m, n = len(first), len(second)
    rank = int(np.floor(m * n / 2 - ndtri(0.5 + CONFIDENCE / 2) * np.sqrt(m * n * (m + n + 1) / 12)))
    ends = (pairs[rank - 1], pairs[-rank]) if rank >= 1 else (np.nan, np.nan)
    return np.array([np.median(pairs), *ends])
