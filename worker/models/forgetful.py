"""Families whose layers do not pass further arguments to their attention."""

from __future__ import annotations

from typing import Any

FORGETFUL_LAYERS = ("NemotronDecoderLayer", "StableLmDecoderLayer")


def hand_on_arguments(model: Any) -> None:
    """Hook forgetful layers, so that they pass the engine's arguments to their attention."""
    for layer in model.modules():
        is_hooked = bool(layer._forward_pre_hooks)  # noqa: SLF001 - torch has no public question
        if type(layer).__name__ in FORGETFUL_LAYERS and not is_hooked:
            layer.register_forward_pre_hook(_keep_arguments, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(_add_arguments, with_kwargs=True)


def _keep_arguments(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.self_attn.handed_on = {name: kwargs[name] for name in ("row_attention", "paged") if name in kwargs}


def _add_arguments(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | attention.handed_on
