"""Times a user's model before and after `lltm.replace_`."""

from __future__ import annotations

import argparse
import copy
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._replace import replace_
from .implementations import OURS
from .report import Row, quartiles, speedup_text
from .timing import Sampler, Settings, measure, timed

THEIRS = "torch.nn"
MOST_SPREAD = 1.3  # third quartile of the times / first quartile


def function(text: str) -> Callable[[], Any]:
    try:
        found: Any = pkgutil.resolve_name(text)
    except (ValueError, ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"cannot import {text}: {error}") from None
    if ":" not in text or not callable(found):
        raise argparse.ArgumentTypeError(f"{text} is not module:function")
    return found  # type: ignore[no-any-return]


def parts(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the model, its inputs and its keyword inputs."""
    match made:
        case (nn.Module() as model, inputs):
            keywords: dict[str, Any] = {}
        case (nn.Module() as model, inputs, dict(keywords)):
            pass
        case _:
            got = type(made).__name__
            if isinstance(made, tuple):
                got = f"({', '.join(type(part).__name__ for part in made)})"
            raise SystemExit(
                "expected a function that returns (model, input) or (model, inputs, keywords),"
                f" with a tuple of inputs and a dict of keywords, got {got}"
            )
    return model, inputs if type(inputs) is tuple else (inputs,), keywords


def tensors(results: Any) -> Iterator[Tensor]:
    """Floating-point tensors only."""
    if isinstance(results, Tensor):
        if results.is_floating_point():
            yield results
    elif isinstance(results, (tuple, list, Mapping)):
        for part in results.values() if isinstance(results, Mapping) else results:
            yield from tensors(part)


def scattered(row: Row) -> str:
    """Describes times with wide quartiles."""
    for name, seconds in row.seconds.items():
        low, _, high = quartiles(seconds)
        if high > MOST_SPREAD * low:
            return f"the quartiles of {name} differ by a factor of {high / low:.1f}"
    return ""


def compare_model(make: Callable[[], Any], settings: Settings) -> Iterator[Row]:
    """Times inference and training of a model, before and after `replace_`.

    Prints no verdict if other processes compete for the cores.

    Args:
        make: returns the model and its input or a tuple of inputs, and may add keyword inputs
    """
    model, arguments, keywords = parts(make())
    models = {OURS: copy.deepcopy(model), THEIRS: model}

    def results_of(name: str) -> list[Tensor]:
        return [*tensors(models[name](*arguments, **keywords))]

    model.eval()
    with torch.no_grad():
        theirs = results_of(THEIRS)  # first, so that a mistake of the user's raises PyTorch's error
    done = replace_(models[OURS])
    print(f"\n{done}")
    if not done.replaced:
        print("No times: lltm replaces no module of this model.")
        return
    with torch.no_grad():
        models[OURS].eval()
        pairs = zip(results_of(OURS), theirs, strict=True)
        differences = (float((x - y).abs().max()) for x, y in pairs)
        print(f"largest difference between the results: {max(differences, default=0.0):.1e}")

    def timer(name: str, training: bool) -> Sampler:
        model = models[name].train(training)

        def run() -> None:
            model.zero_grad()
            results = results_of(name)
            if training:
                torch.autograd.backward([r.sum() for r in results if r.requires_grad])

        return timed(run, training)

    rows = []
    for kind in ("inference", "training"):
        builds = {name: partial(timer, name, kind == "training") for name in models}
        rows.append(measure(f"model, {kind}", builds, settings))
        print("\n".join(rows[-1].lines()), flush=True)
        yield rows[-1]
    for row in rows:
        kind = row.title.removeprefix("model, ")
        if why := settings.load or scattered(row):
            print(f"No verdict on {kind}: {why}.")
        else:
            print(f"With lltm, {kind} is {speedup_text(row.speedup(THEIRS))} times as fast.")
