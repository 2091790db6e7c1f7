from hf_zero.engine import direct


direct.MIN_NUMEL = 0  # the models of the tests are small; see also `tests.distributed`
