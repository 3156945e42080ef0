"""Options that every command with models has, in the same words."""

from __future__ import annotations

from typing import Any

import typer

TARGET_HELP = "Target model: directory, hub id or bundled name."

TARGET: Any = typer.Option("bundled:target", help=TARGET_HELP)
DRAFT: Any = typer.Option("bundled:draft", help="Draft model, likewise; empty for plain decoding.")
DEVICE: Any = typer.Option("auto", help="auto, cpu, cuda or cuda:N.")
BACKEND: Any = typer.Option(
    "auto", help="auto: OpenVINO on x86 CPUs where it is installed and runs the models exactly; torch; openvino."
)
DTYPE: Any = typer.Option("auto", help="auto, float32, bfloat16 or float16.")
