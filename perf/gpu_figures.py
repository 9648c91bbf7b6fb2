"""Decoding on a GPU: the core step launched kernel by kernel, and captured as a CUDA graph.

Run: python -m perf.gpu_figures
"""

from perf.figure import figure

COMMAND = "python -m perf.gpu_figures"
ROWS = 64
PROMPT, NEW_TOKENS = 32, 128


def measurements() -> list[dict]:
    import torch

    from halting_bench.timing.clock import clock_for
    from perf.runtime_setup import STEPS, runtime_model

    unit = "tokens/s"
    names = {mode: f"{mode} decoding, {ROWS} rows, bfloat16, {STEPS} steps a token" for mode in ("eager", "graph")}
    if not torch.cuda.is_available():
        return [figure(f"{name} (no GPU here)", None, unit, None, COMMAND, device="cuda") for name in names.values()]
    from halting_bench.halting.policies import FixedDepth
    from halting_bench.timing.workloads import decoding

    model = runtime_model().to("cuda", torch.bfloat16)
    prompts = torch.randint(0, 256, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for mode, name in names.items():
        build = decoding(model, prompts, max_new_tokens=NEW_TOKENS, max_steps=STEPS, mode=mode)
        run = build("fixed", FixedDepth(STEPS)).point.run
        run()
        samples = [clock_for("cuda").time(run) for _ in range(5)]
        best = sorted(sample.tokens / sample.seconds for sample in samples)[2]
        rows.append(figure(name, best, unit, None, COMMAND, device=torch.cuda.get_device_name()))
    return rows


if __name__ == "__main__":
    for row in measurements():
        print(row)
