"""The `laga-attn` command; each subcommand lives beside what it runs."""

from __future__ import annotations

import typer

from laga_attn.bench.command import bench
from laga_attn.doctor import doctor
from laga_attn.inference.command import generate
from laga_attn.plan.command import plan
from laga_attn.train.command import train
from laga_attn.train.demo import demo

__all__ = ["app", "main"]

app = typer.Typer(
    name="laga-attn",
    help="Context parallelism for multi-head latent attention: train, compare, plan, generate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(demo)
app.command()(generate)
app.command()(doctor)
app.command()(bench)
app.command()(plan)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
