"""From files or the hub to what a trainer takes."""

from hf_zero.recipes.data.mixture import Mixture, MixtureArguments, check_mixture, load_each
from hf_zero.recipes.data.rows import BadRow, Data, Rows, encode_rows, is_reused
from hf_zero.recipes.data.sources import check_sources, load_rows


__all__ = ["BadRow", "Data", "Mixture", "MixtureArguments", "Rows"]
__all__ += ["check_mixture", "check_sources", "encode_rows", "is_reused", "load_each", "load_rows"]
