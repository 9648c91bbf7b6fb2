"""How the plots look: one palette, one place for sizes, and which policies share a panel.

A sweep has more policies than one panel can tell apart, so they are grouped by what they watch; within a group each has
its own colour and marker, the same in every plot of a run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WIDTH = 5.5  # inches: the text width of a one-column paper
DPI = 200

RC = {
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "legend.fontsize": 6.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "svg.hashsalt": "halting-bench",  # ids in the file depend on nothing but the figure
}

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F5A3C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
UNIFORM = "#000000"
UNIFORM_LINE: dict[str, Any] = {"color": UNIFORM, "linewidth": 1.0, "marker": ".", "markersize": 3, "zorder": 4}
ORACLE = "#8a8a8a"

_GROUPS = {
    "size of a step": ("latent-diff", "latent-diff-old", "step-norm", "cosine", "fixed-point-inf", "attention-fixed-point"),
    "change between steps": (
        "acceleration",
        "acceleration-rel",
        "acceleration-norm",
        "step-ratio",
        "step-norm-change",
        "step-norm-change-rel",
    ),
    "change of the prediction": ("kl", "kl-reverse", "min-p-kl", "entropy-diff", "argmax-stable", "output-stable"),
    "confidence and gates": ("entropy", "max-prob", "margin", "gate-cdf", "act", "ponder", "router-linear", "router-mlp"),
}
OTHER = "other rules"


@dataclass(frozen=True)
class Look:
    """How one policy is drawn."""

    group: str
    colour: str
    marker: str
    phase: float  # where in the gap between two markers its own begin, 0 to 1


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """A look for each policy, in the order of the groups. A group with more than seven policies becomes several.

    A policy that is a variant of a known one (`kl-two-hits`) joins its group.
    """
    members: dict[str, list[str]] = {}
    for policy in dict.fromkeys(policies):
        members.setdefault(_group(policy), []).append(policy)
    found: dict[str, Look] = {}
    for group in [*_GROUPS, OTHER]:
        for position, policy in enumerate(members.get(group, [])):
            part, index = divmod(position, len(COLOURS))
            found[policy] = Look(
                group if part == 0 else f"{group} ({part + 1})", COLOURS[index], MARKERS[index], index / len(COLOURS)
            )
    return found


def _group(policy: str) -> str:
    known = {name: group for group, names in _GROUPS.items() for name in names}
    matching = [name for name in known if policy == name or policy.startswith(f"{name}-")]
    return known[max(matching, key=len)] if matching else OTHER
