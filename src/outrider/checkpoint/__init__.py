"""What a checkpoint's files say, checked before a byte of them is loaded.

`outrider doctor` and everything that loads a model, a head or a tokenizer share these checks. They
need neither torch nor Transformers.
"""

from outrider.checkpoint.check import Checkpoint, checked, examine, misfits
from outrider.checkpoint.files import check_files, read_json
from outrider.checkpoint.weights import BYTES, Tensor, head_files, model_files, read_header

__all__ = [
    "BYTES",
    "Checkpoint",
    "Tensor",
    "check_files",
    "checked",
    "examine",
    "head_files",
    "misfits",
    "model_files",
    "read_header",
    "read_json",
]
