"""SGLang's own speculation on ROCm, made to sample: no use is made of Outrider's algorithm.

SGLang 0.5.11 verifies drafts with three functions of `sgl_kernel` that ROCm builds lack. There it
takes the most likely token instead, whatever a request's temperature, top_k and top_p. The repair
puts ours in their place and sets the flags by which SGLang decides.
"""

from __future__ import annotations

import logging
from importlib import import_module

from outrider.engines.sglang.versions.contract import hook_target
from outrider.engines.sglang.versions.contract_0_5_11 import ROCM_SWITCHES
from outrider.kernels.renorm_prob import top_k_renorm_prob, top_p_renorm_prob
from outrider.kernels.tree_sampling import tree_speculative_sampling_target_only

logger = logging.getLogger(__name__)

FUNCTIONS = (top_k_renorm_prob, top_p_renorm_prob, tree_speculative_sampling_target_only)
"""What ROCm builds of `sgl_kernel` lack, under its names."""


def repair() -> None:
    """Let SGLang's verification sample, in this process."""
    for name, switches in ROCM_SWITCHES.items():
        module = import_module(hook_target(name))
        for function in FUNCTIONS:
            if getattr(module, function.__name__, None) is None:
                setattr(module, function.__name__, function)
        for flag, (value, _) in switches.items():
            setattr(module, flag, value)
    logger.info(
        "SGLang's own speculation now samples on ROCm, by temperature, top_k and top_p "
        "(without the repair it takes the most likely token)"
    )
