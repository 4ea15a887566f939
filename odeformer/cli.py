"""The command line: parse, call, print. Everything else is in the library.

Heavy modules are imported inside the commands, so that help and mistakes are answered quickly.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from odeformer.causality import CausalityError
from odeformer.training.errors import DivergedError, TrainingInterrupted
from solvers import SolveError

FAILED = 1
"""Exit code where the work was done and its answer is no, such as a certificate that fails."""
REFUSED = 2
"""Exit code for bad input and for work that could not be finished."""
INTERRUPTED = 130
EXPECTED = (ValueError, TypeError, OSError, ImportError, CausalityError, DivergedError, SolveError)
"""Errors whose message is written for the user."""

app = typer.Typer(
    name="odeformer",
    help="Fast-slow transformers in continuous time: train as a flow, switch to the discrete block, prove that both are one.",
    epilog="Start with: odeformer demo. An option of a config is changed by section.key=value, for instance training.steps=500.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...", help="Changes to the config, such as model.pool_size=8 training.steps=500."
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file with the sections model, data, training, flow.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Folder to write; must not hold anything yet. Default: the next free runs/COMMAND-N."
    ),
]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    _: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog="Examples: odeformer train training.steps=500  |  odeformer train --config run.yaml --output runs/first  |  "
    "odeformer train --output runs/first --resume"
)
def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Output = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --output from its last checkpoint.")
    ] = False,
) -> None:
    """Train a model. Without a config file: a small model on the text of Python's own standard library."""
    from odeformer.training.configuration import CONFIG_FILE, load_run_config

    if resume and output is None:
        raise ValueError("--resume needs --output, the folder of the run to continue")
    if resume and config is None and output is not None:
        if not (output / CONFIG_FILE).is_file():
            raise ValueError(f"there is no run to resume in {output}: it has no {CONFIG_FILE}")
        config = output / CONFIG_FILE
    settings = load_run_config(config, overrides or [])
    folder = output or free_folder("train")

    from odeformer.training.run import train as run

    try:
        result = run(settings, folder, resume=resume)
    except TrainingInterrupted as stopped:
        _complain(f"{stopped}\nContinue with: odeformer train --output {folder} --resume")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(
        f"{result.steps} steps, validation loss {result.validation_loss:.4f} nats per token, "
        f"{result.tokens_per_second:,.0f} tokens/s"
    )
    if result.switch is not None:
        typer.echo(f"Switched to discrete at step {result.switch['step']}: validation loss {result.switch['gap']:+.4f}")
    typer.echo(f'Everything is in {folder}. Try: odeformer generate {folder} --prompt "def "')


@app.command(epilog="Example: odeformer switch runs/train-1 --output runs/discrete")
def switch(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint folder.")],
    output: Output = None,
) -> None:
    """Turn a continuous checkpoint into a discrete one: certify, measure the loss, write the same weights."""
    folder = output or free_folder("switch")
    from odeformer.training.switch import switch_checkpoint

    report = switch_checkpoint(source, folder)
    typer.echo(str(report))
    if not report.ok:
        _complain("the certificate fails, so nothing was written")
        raise typer.Exit(FAILED)
    typer.echo(f"The discrete checkpoint is in {folder}")


@app.command(
    epilog="Examples: odeformer certify  |  odeformer certify model.pool_size=7 model.sublayers=sequential  |  "
    "odeformer certify runs/train-1 --json certificate.json"
)
def certify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|CONFIG.yaml] [SECTION.KEY=VALUE]...", help="What to certify; default: the default config."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the certificate to this file too.")] = None,
) -> None:
    """Prove that the discrete block is one solver step of the continuous model. Exit code 1 if the proof fails."""
    words = arguments or []
    target = Path(words[0]) if words and ("=" not in words[0] or Path(words[0]).exists()) else None
    overrides = words if target is None else words[1:]
    if json_file is not None and json_file.exists():
        raise FileExistsError(f"{json_file} exists; choose another name")

    from odeformer.discretisation import certify as certify_model
    from odeformer.files import write_text
    from odeformer.training.checkpoints import load_model
    from odeformer.training.configuration import load_run_config

    subject: Any
    if target is None or target.suffix in (".yaml", ".yml"):
        subject = load_run_config(target, overrides).model
    elif overrides:
        raise ValueError(f"a checkpoint has its own config; it takes no overrides such as {overrides[0]!r}")
    else:
        subject = load_model(target)
    found = certify_model(subject)
    typer.echo(str(found))
    if json_file is not None:
        write_text(json_file, found.to_json() + "\n")
    if not found.ok:
        raise typer.Exit(FAILED)


@app.command(epilog="Example: odeformer causality model.pool_size=7")
def causality(overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Test that no output of a model depends on a later token. Exit code 1 if one does."""
    from odeformer.causality import check_causality
    from odeformer.training.configuration import load_run_config
    from odeformer.training.preparation import check_config, initial_model, with_vocabulary

    settings = load_run_config(config, overrides or [])
    check_config(settings)
    model = initial_model(with_vocabulary(settings, settings.model.vocab_size or 256))
    report = check_causality(model)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command(
    epilog='Example: odeformer generate runs/train-1 --prompt "class " --count 300 --temperature 0.8 --top-k 50'
)
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or what `odeformer switch` wrote.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    count: Annotated[int, typer.Option(help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; 1: as the model believes.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Continue a text with a trained model."""
    from odeformer.training.samples import generate_text

    for piece in (prompt, generate_text(run, prompt, count, temperature=temperature, top_k=top_k, seed=seed)):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command(epilog="Example: odeformer demo --output runs/demo")
def demo(
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="A much shorter run, to see that everything works.")] = False,
) -> None:
    """The whole story on real text in a few minutes: proofs, training, the switch, a report to read."""
    folder = output or free_folder("demo")
    from odeformer.demo import run_demo

    run_demo(folder, quick)


def free_folder(command: str, root: Path = Path("runs")) -> Path:
    """The first of runs/COMMAND-1, runs/COMMAND-2, ... that does not exist."""
    number = 1
    while (root / f"{command}-{number}").exists():
        number += 1
    return root / f"{command}-{number}"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. Expected errors are one message on standard error, without a traceback."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in words
    # Accepted anywhere, although it belongs before the command.
    words = [word for word in words if word != "--debug"]
    try:
        code = app(words, prog_name="odeformer", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        return INTERRUPTED
    except EXPECTED as error:
        if debug:
            traceback.print_exc()
        else:
            _complain(_message(error))
        return REFUSED
    except Exception as error:
        # A mistake in the command line itself. typer brings its own copy of click's exceptions, or not, by version.
        if not hasattr(error, "show"):
            raise
        error.show()
        return REFUSED


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is None or str(error.filename) in error.strerror
        return error.strerror if named else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _complain(message: str) -> None:
    typer.echo(f"odeformer: {message}", err=True)


if __name__ == "__main__":
    sys.exit(main())
