"""The room of files is optional: a run that keeps nothing on disk does not load it."""

import pytest

from tests.distributed import run_program


RUN = """
import sys, torch, hf_zero
settings = {"offload": "params", **({"offload_dir": sys.argv[1]} if len(sys.argv) > 1 else {})}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
engine = hf_zero.shard(model, stage=3, **settings)
optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(sorted(name for name in sys.modules if name.startswith("hf_zero.storage")))
"""


@pytest.mark.quick
def test_who_keeps_nothing_on_disk_does_not_load_its_room(tmp_path):
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    (without,), (others,) = (run_program(["run.py", *more], tmp_path) for more in ([], [str(tmp_path)]))
    assert without.stdout == "[]\n", without.stderr
    assert "hf_zero.storage.disk" in others.stdout  # so that the name above is the right one
