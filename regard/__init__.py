"""Exact attention for PyTorch: right on any input, on any device, and clear when it refuses."""

from regard.dispatch import Explanation
from regard.functional import attention, attention_varlen, explain

__version__ = "0.1.0"
__all__ = ["Explanation", "attention", "attention_varlen", "explain"]
