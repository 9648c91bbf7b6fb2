"""halting-bench eval: one operating point run the lm-eval way."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halting_bench.cli.output import print_json, say
from halting_bench.errors import UserError


def evaluate(
    model: Annotated[str, typer.Option(help="Bundled name, folder, owner/name[@revision] or file.py@Class.")],
    policy: Annotated[str, typer.Option(help="Recipe name, FILE.yaml or FILE.py@Class; or fixed.")],
    threshold: Annotated[float, typer.Option(help="The operating point; of fixed: the depth.")],
    tasks: Annotated[str, typer.Option(help="NAME[,NAME...]: tasks, groups, tags or YAML files.")],
    limit: Annotated[int | None, typer.Option(help="The first so many documents of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with more task files.")] = None,
    gen_kwargs: Annotated[str | None, typer.Option(help="key=value[,...] over the tasks' own generation arguments.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Deepest step. Default: four times the trained mean.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Positions of one forward; the rest is cut, left.")] = None,
    kv_mode: Annotated[str, typer.Option(help="What later tokens see of one that exited early.")] = "latest",
    prefill: Annotated[str, typer.Option(help="adaptive, full or shared.")] = "adaptive",
    seed: Annotated[int, typer.Option(help="Of the initial states and of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
    batch_rows: Annotated[int, typer.Option(help="Positions scored at once.")] = 4096,
    slots: Annotated[int, typer.Option(help="Texts generated at once.")] = 32,
    output: Annotated[Path, typer.Option(help="Folder for results_*.json and samples_*.jsonl.")] = Path("results/lm-eval"),
    offline: Annotated[bool, typer.Option("--offline", help="No request to the hub (also: HALTING_BENCH_OFFLINE=1).")] = False,
    unsafe_code: Annotated[bool, typer.Option("--confirm-run-unsafe-code", help="Run code that a model wrote.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own class.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The results document on stdout instead of a table.")] = False,
) -> None:
    """Run lm-eval tasks at one operating point; write what lm-eval writes, with depth and cost added."""
    from halting_bench.evaluate import EvalRequest, results_table, write_results
    from halting_bench.evaluate import evaluate as run

    request = EvalRequest(
        model=model,
        policy=policy,
        threshold=threshold,
        tasks=tuple(tasks.split(",")),
        limit=limit,
        num_fewshot=num_fewshot,
        include_path=include_path,
        gen_kwargs=parse_arguments(gen_kwargs),
        max_steps=max_steps,
        max_length=max_length,
        kv_mode=kv_mode,
        prefill=prefill,
        seed=seed,
        device=device,
        dtype=dtype,
        batch_rows=batch_rows,
        slots=slots,
        offline=offline,
        confirm_run_unsafe_code=unsafe_code,
        trust_remote_code=trust_remote_code,
    )
    results = run(request)
    path = write_results(results, output)
    if as_json:
        print_json({key: value for key, value in results.items() if key != "samples"})
    else:
        print(results_table(results), end="")
    say(f"Results and samples: {path}")


def parse_arguments(text: str | None) -> dict[str, Any] | None:
    """`key=value,key=value`, values as YAML reads them."""
    import yaml

    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise UserError(f"--gen-kwargs {text}: write key=value[,key=value], for example max_gen_toks=64,temperature=0.7")
    return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
