"""Is this code right? Identify anybody's cast, quantizer or GEMM by the specification's names, and test it.

``identify_cast`` and ``identify_quantizer`` say what a function of one array is, ``gemm.identify.identify`` what a GEMM is. ``strategies``,
``parameters`` and ``require`` are for tests of any library; ``vectors`` judges programs in any language; ``certify`` covers the libraries installed here.
"""

from fp8ref.conformance.cast.identify import identify_cast as identify_cast
from fp8ref.conformance.quantizer.identify import identify_quantizer as identify_quantizer
