"""Backends that run the models, and their interface to the speculative step.

A step asks a model for one thing: *a pass over ragged rows*. Rows hold different numbers of tokens. A pass processes some
tokens of some rows and returns the wanted logits. In `passes.py` a pass is a list of parts, and a part is neighbouring rows
with equally many tokens, each from its own position on. Decoding is one part, a prompt is one, and sequences that verify
different numbers of tokens are several.

A backend also keeps the keys and values of the rows (`RowStore`): rows are copied, exchanged and released. Rejected tokens
are overwritten by the next ones. Where a row lies, and what exchanging two of them moves, is up to the backend.

    torch            worker/backends/torch/cached_model.py   any device; the reference
    CUDA graphs      worker/backends/torch/captured_model.py the same passes, recorded
    OpenVINO         worker/backends/openvino x86 CPUs, if the package is installed
"""
