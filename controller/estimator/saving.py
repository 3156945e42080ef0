"""Saving what was learned of a pair as bytes, and restoring it: an .npz file without pickled objects."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from speclen.controller.estimator.features import prior_of
from speclen.controller.estimator.model import Saved
from speclen.controller.estimator.tokens import TokenPrior

if TYPE_CHECKING:
    from speclen.controller.estimator.context import Context

FORMAT = 1
UNUSABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, OSError, EOFError, zipfile.BadZipFile)


def pack(header: dict[str, Any], parts: dict[str, Any]) -> bytes:
    """The header and, by prefix, the attributes that each object names in STATE."""
    arrays = {
        f"{prefix}/{name}": np.asarray(getattr(part, name)) for prefix, part in parts.items() for name in part.STATE
    }
    buffer = io.BytesIO()
    arrays["header"] = np.frombuffer(json.dumps({"format": FORMAT, **header}).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


class Packed:
    """A state that was packed. ValueError for what is none."""

    def __init__(self, content: bytes) -> None:
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                self._arrays = {name: file[name] for name in file.files}
            self.header: dict[str, Any] = json.loads(self._arrays.pop("header").tobytes())
        except UNUSABLE as error:
            raise ValueError("this is no state of an estimator") from error
        if self.header.get("format") != FORMAT:
            raise ValueError(f"the state has format {self.header.get('format')}, expected {FORMAT}")

    def restore(self, prefix: str, part: Any) -> None:
        """Give an object the attributes that were packed; numbers stay numbers."""
        for name in part.STATE:
            value = self._arrays[f"{prefix}/{name}"]
            known = getattr(part, name)
            setattr(part, name, value.copy() if isinstance(known, np.ndarray) else type(known)(value.item()))


def finite(arrays: Iterator[np.ndarray]) -> bool:
    """True if all values are finite."""
    return all(bool(np.isfinite(values).all()) for values in arrays)


def save_pair(contexts: Sequence[Context], prior: TokenPrior) -> bytes:
    """Everything that was learned of a pair."""
    header = {"contexts": [header_of(context) for context in contexts]}
    parts: dict[str, Any] = {"prior": prior}
    for at, context in enumerate(contexts):
        parts |= {f"{at}/{name}": part for name, part in parts_of(context)}
    return pack(header, parts)


def restore_pair(contexts: Sequence[Context], prior: TokenPrior, content: bytes) -> None:
    """Go on from what was saved. ValueError for what is no state of these contexts."""
    packed = Packed(content)
    try:
        headers = packed.header["contexts"]
        by_key = {json.dumps(list(context.key)): context for context in contexts}
        packed.restore("prior", prior)
        for at, header in enumerate(headers):
            context = by_key[json.dumps(header["key"])]
            restore_header(context, header)
            for name, part in parts_of(context):
                packed.restore(f"{at}/{name}", part)
            check_restored(context)
            if not finite(_arrays(context)):
                raise ValueError(f"a number of context {context.key.device} is not finite")
    except UNUSABLE as error:
        raise ValueError(f"the state does not fit its contexts: {error}") from error


def _arrays(context: Context) -> Iterator[np.ndarray]:
    for _, part in parts_of(context):
        for name in part.STATE:
            yield np.asarray(getattr(part, name), dtype=float)


def header_of(context: Context) -> dict[str, Any]:
    """Names and counts, as JSON."""
    return {
        "key": list(context.key),
        "limits": list(context.limits),
        "workers": list(context.workers.tracked),
        "untracked": list(context.workers.untracked),
        "groups": list(context.groups),
        "counts": [context.num_reports, context.num_probes, context.has_decided],
        "solved": [name for name, group in context.groups.items() if group.estimates is not None],
    }


def restore_header(context: Context, header: dict[str, Any]) -> None:
    """Make the workers and groups of a saved state."""
    if list(context.limits) != header["limits"]:
        raise ValueError(f"it was saved with limits {header['limits']}, the context has {list(context.limits)}")
    context.workers.tracked = {name: context.workers.new() for name in header["workers"]}
    context.workers.untracked = {name: context.workers.new() for name in header["untracked"]}
    context.groups = {name: context.new_group() for name in header["groups"]}
    context.num_reports, context.num_probes, context.has_decided = header["counts"]
    for name in header["solved"]:
        context.groups[name].saved = Saved()


def parts_of(context: Context) -> Iterator[tuple[str, Any]]:
    """Everything with a STATE, by name."""
    yield from (("context", context), ("cells", context.cells), ("traffic", context.traffic))
    yield from (("pool", context.workers.times), ("pool-tokens", context.workers.tokens))
    for kind, workers in (("worker", context.workers.tracked), ("untracked", context.workers.untracked)):
        for at, worker in enumerate(workers.values()):
            yield f"{kind}/{at}", worker
            yield f"{kind}/{at}/tail", worker.tail
            if workers is context.workers.tracked:
                yield from ((f"{kind}/{at}/times", worker.times), (f"{kind}/{at}/tokens", worker.tokens))
    for at, group in enumerate(context.groups.values()):
        yield from ((f"group/{at}", group), (f"group/{at}/selection", group.selection))
        if group.estimates is not None:
            group.saved = Saved(group.estimates)
        if group.saved is not None:
            yield f"group/{at}/estimates", group.saved


def check_restored(context: Context) -> None:
    """Raise ValueError where what was restored does not fit together."""
    cells, features = context.cells.features.shape
    if features != len(prior_of(context.grid.slopes).mean) or len(context.offset) != context.grid.num_cells:
        raise ValueError("its features are others")
    for group in context.groups.values():
        if group.selection.arms.shape != context.grid.sizes.shape:
            raise ValueError("its ranges of batch sizes are others")
        if group.saved is not None:
            group.estimates = group.saved.spread(context.grid, context.cells, context.offset)
            group.selection.note(group.estimates)
    if any(len(worker.times.moment) > cells for worker in context.workers.tracked.values()):
        raise ValueError("it has evidence of cells that it lacks")
