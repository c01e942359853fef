"""Times a user's model before and after `lltm.replace_`."""

from __future__ import annotations

import argparse
import copy
import os
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


def function(text: str) -> Callable[[], tuple[nn.Module, Any]]:
    try:
        found: Any = pkgutil.resolve_name(text)
    except (ValueError, ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"cannot import {text}: {error}") from None
    if ":" not in text or not callable(found):
        raise argparse.ArgumentTypeError(f"{text} is not module:function")
    return found  # type: ignore[no-any-return]


def tensors(results: Any) -> Iterator[Tensor]:
    """Floating-point tensors only."""
    if isinstance(results, Tensor):
        if results.is_floating_point():
            yield results
    elif isinstance(results, (tuple, list, Mapping)):
        for part in results.values() if isinstance(results, Mapping) else results:
            yield from tensors(part)


def busy() -> str:
    """Describes a load that exceeds the cores."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load is {load:.1f} on {cores} cores" if load > cores else ""


def scattered(row: Row) -> str:
    """Describes times with wide quartiles."""
    for name, seconds in row.seconds.items():
        low, _, high = quartiles(seconds)
        if high > MOST_SPREAD * low:
            return f"the quartiles of {name} differ by a factor of {high / low:.1f}"
    return ""


def compare_model(make: Callable[[], tuple[nn.Module, Any]], settings: Settings) -> list[Row]:
    """Times inference and training of a model, before and after `replace_`.

    Prints no verdict if other processes compete for the cores.

    Args:
        make: returns the model and its input, or a tuple of inputs
    """
    model, inputs = make()
    arguments = inputs if type(inputs) is tuple else (inputs,)
    models = {OURS: copy.deepcopy(model), THEIRS: model}
    done = replace_(models[OURS])
    print(f"\n{done}")
    if not done.replaced:
        return []
    if load := busy():
        print(f"Warning: {load}. Run nothing else at the same time.")

    def timer(name: str, training: bool) -> Sampler:
        model = models[name].train(training)

        def run() -> None:
            model.zero_grad()
            results = [*tensors(model(*arguments))]
            if training:
                torch.autograd.backward([r.sum() for r in results if r.requires_grad])

        return timed(run, training)

    with torch.no_grad():
        ours, theirs = ([*tensors(models[n].eval()(*arguments))] for n in (OURS, THEIRS))
    differences = (float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True))
    print(f"largest difference between the results: {max(differences, default=0.0):.1e}")
    rows = []
    for kind in ("inference", "training"):
        builds = {name: partial(timer, name, kind == "training") for name in models}
        rows.append(measure(f"model, {kind}", builds, settings))
        print("\n".join(rows[-1].lines()), flush=True)
    for row in rows:
        kind = row.title.removeprefix("model, ")
        if why := load or scattered(row):
            print(f"No verdict on {kind}: {why}.")
        else:
            print(f"With lltm, {kind} is {speedup_text(row.speedup(THEIRS))} times as fast.")
    return rows
