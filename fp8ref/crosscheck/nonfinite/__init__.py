"""Debug a NaN or infinity: find where a failed step first became non-finite (SEMANTICS K-9).

``rerun`` takes the step again on one device, ``sites`` lists the backend's values in the order of
its pass, and ``report`` names the first that is not finite.
"""
