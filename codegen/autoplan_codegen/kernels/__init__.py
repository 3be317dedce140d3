"""Fused operators in, registered as ``torch.ops.autoplan.*`` out: importing this package defines them all.

Every operator has a schema, a fake implementation, a gradient that saves as little as it can, and two
implementations of the same meaning: Triton kernels where the device runs Triton, plain PyTorch elsewhere.
"""

from autoplan_codegen.kernels import attention as attention
from autoplan_codegen.kernels import cross_entropy as cross_entropy
from autoplan_codegen.kernels import experts as experts
from autoplan_codegen.kernels import gated as gated
from autoplan_codegen.kernels import linear_cross_entropy as linear_cross_entropy
from autoplan_codegen.kernels import norms as norms
from autoplan_codegen.kernels import optimizer as optimizer
from autoplan_codegen.kernels import rotary as rotary
from autoplan_codegen.kernels import sparse as sparse
from autoplan_codegen.kernels.operators import OPERATORS as OPERATORS
