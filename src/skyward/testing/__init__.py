"""Fakes and contract suites for users of the seams; the extra ``testing`` installs their requirements.

Only the suites require pytest.
"""
