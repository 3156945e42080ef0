"""Backends that run the models, and their interface to the speculative step.

A step asks a model for one thing: *a pass over ragged rows*. Rows hold different numbers of tokens; a pass feeds some
tokens of some rows and returns the logits that were asked for. `passes.py` says how that is put: a pass is a list of parts,
a part is neighbouring rows that are fed equally many tokens, each from its own place on. Decoding is one part, a prompt is
one, and rows that verify different numbers of tokens are several. A token costs what it costs, whichever part it is in.

A backend also keeps the keys and values of the rows (`RowStore`): rows are copied, exchanged and released, and what was
rejected is forgotten by feeding the next tokens over it. Where a row lies, and whether exchanging two of them moves memory
or two entries of a table, is the backend's own affair. Scheduler, rules and step know nothing else of it.

    torch            worker/backends/torch/cached_model.py   any device; the reference
    CUDA graphs      worker/backends/torch/captured_model.py the same passes, recorded
    OpenVINO         worker/backends/openvino x86 CPUs, if the package is installed
"""
