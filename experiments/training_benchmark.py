"""What a training step costs: against a plain GPT in nanoGPT's form, and coupled against dense, each pair in one run.

    python -m experiments.training_benchmark              # ratios, about 4 minutes on two cores
    python -m experiments.training_benchmark --quality --text FILE   # also 2000 steps on FILE's characters: validation loss

Peers are timed in turns, round by round, and the ratio is that of the medians, so that a slow minute touches both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.plain_gpt import PlainGPT
from odeformer import FastSlowConfig, FastSlowLM, RunConfig
from odeformer.data import Batches, load_data
from odeformer.files import write_json
from odeformer.training import train
from odeformer.training.module import make_optimizer

NANOGPT = {"n_layer": 4, "n_head": 4, "d_model": 128, "context": 64}
"""nanoGPT's CPU setting; 12 sequences a step."""
WARMUP_ROUNDS = 1


def train_step(model: nn.Module, optimiser: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    """Forward, backward, clip, update."""
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def in_turns(peers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median over rounds of what each peer returns (milliseconds a step), the peers taking turns."""
    found: dict[str, list[float]] = {name: [] for name in peers}
    for index in range(rounds + WARMUP_ROUNDS):
        for name, run in peers.items():
            milliseconds = run()
            if index >= WARMUP_ROUNDS:
                found[name].append(milliseconds)
    return {name: statistics.median(values) for name, values in found.items()}


def plain_loop(model: nn.Module, optimiser: torch.optim.Optimizer, batches: Batches, steps: int) -> Callable[[], float]:
    """A peer that does `steps` training steps in a bare loop."""
    counter = itertools.count()

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            train_step(model, optimiser, *batches.batch(next(counter)))
        return 1e3 * (time.perf_counter() - start) / steps

    return run


def trainer_loop(config: RunConfig, steps: int) -> Callable[[], float]:
    """A peer that trains by `odeformer.training.train`, with its checks, logs and checkpoints; only the steps are timed."""
    settings = dataclasses.replace(
        config.training, steps=steps, evaluate_every=steps, evaluation_batches=1, checkpoint_every=steps, progress=False
    )
    config = dataclasses.replace(config, training=settings)

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return 1e3 * train(config, Path(folder) / "run").seconds / steps

    return run


def against_plain_gpt(rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds a step in nanoGPT's CPU setting: plain GPT, and the dense discrete arm in the library's training run."""
    config = RunConfig(model=FastSlowConfig(**NANOGPT, coupling="dense"))  # type: ignore[arg-type]
    data = load_data(config.data, context=config.model.context)
    batches = Batches(data.train, 12, config.model.context, seed=0)
    plain = PlainGPT(256, 64, 4, 4, 128)
    peers = {
        "plain GPT": plain_loop(plain, plain.optimiser(), batches, steps),
        "odeformer train, dense": trainer_loop(config, steps),
    }
    return in_turns(peers, rounds)


def coupled_against_dense(rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds a step at P = 16, T = 256, equal depth: the three arms in a bare loop."""
    config = RunConfig()
    data = load_data(config.data, context=256)
    batches = Batches(data.train, 12, 256, seed=0)
    peers = {}
    for coupling in ("dense", "coupled", "frozen"):
        model = FastSlowLM(dataclasses.replace(config.model, vocab_size=256, context=256, coupling=coupling))
        peers[coupling] = plain_loop(model, make_optimizer(model, config.training), batches, steps)
    return in_turns(peers, rounds)


def quality(text: Path, folder: Path) -> float:
    """Validation loss (nats per character) of the dense discrete arm after 2000 steps on the characters of `text`."""
    config = RunConfig(
        model=NANOGPT | {"coupling": "dense"},  # type: ignore[arg-type]
        data={"source": str(text), "tokenizer": "characters"},  # type: ignore[arg-type]
        training={"steps": 2000, "evaluation_batches": 200, "evaluate_every": 500},  # type: ignore[arg-type]
    )
    return train(config, folder).validation_loss


def table(title: str, times: Mapping[str, float]) -> str:
    """One line a peer, with its ratio to the first."""
    first = next(iter(times.values()))
    lines = [f"  {name:24s} {value:8.1f} ms/step   {value / first:5.2f} x" for name, value in times.items()]
    return "\n".join([title, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each peer")
    parser.add_argument(
        "--steps", type=int, default=100, help="steps a turn against the plain GPT; a quarter at T = 256"
    )
    parser.add_argument("--quality", action="store_true", help="also train 2000 steps and print the validation loss")
    parser.add_argument("--text", type=Path, help="text file for --quality")
    parser.add_argument("--output", type=Path, default=Path("runs/training_benchmark.json"))
    arguments = parser.parse_args()
    if arguments.quality and (arguments.text is None or not arguments.text.is_file()):
        parser.error(f"--quality needs --text, a text file; got {arguments.text}")
    results: dict[str, object] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    plain = against_plain_gpt(arguments.rounds, arguments.steps)
    print(table("4 layers, width 128, context 64, batch 12:", plain), flush=True)
    arms = coupled_against_dense(arguments.rounds, max(1, arguments.steps // 4))
    print(table("4 layers, width 128, P = 16, T = 256, batch 12:", arms), flush=True)
    results |= {"against_plain_gpt_ms": plain, "arms_ms": arms}
    if arguments.quality:
        with tempfile.TemporaryDirectory() as folder:
            results["validation_loss"] = quality(arguments.text, Path(folder) / "run")
        print(f"Validation loss after 2000 steps: {results['validation_loss']:.3f} nats per character")
    write_json(arguments.output, results)
    print(f"Written to {arguments.output}")


if __name__ == "__main__":
    main()
