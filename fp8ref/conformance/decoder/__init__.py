"""Decoders of codes and dequantizers of codes and scales.

identify      what a function takes codes for, and how it multiplies them
subject       the function, and how it takes codes and scales
codes         all codes, and how they are packed
readings      what codes may be taken for
scales        which scale, and how
scale_index   which scale an element is multiplied by
products      how products round, and scales at the ends of their range
report        findings and faults
"""

from fp8ref.conformance.decoder.identify import identify_decoder as identify_decoder
from fp8ref.conformance.decoder.identify import require_decoder as require_decoder

__all__ = ["identify_decoder", "require_decoder"]
