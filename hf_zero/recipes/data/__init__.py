"""From files or the hub to what a trainer takes."""

from hf_zero.recipes.data.encoding import encode_rows
from hf_zero.recipes.data.rows import BadRow, Data, Rows
from hf_zero.recipes.data.sources import check_sources, load_rows


__all__ = ["BadRow", "Data", "Rows", "check_sources", "encode_rows", "load_rows"]
