"""What trials have come to, in numbers."""

from dataclasses import dataclass, fields


@dataclass
class Count:
    """One row of the table.

    Args:
        trials (`int`): how many there were.
        survived (`int`): the run, gone on with where need be, ended with the weights of the unbroken run.
        refused (`int`): it ended with a message before it was gone on with.
        lost (`int`): a complete checkpoint was lost, or the run ended with other weights.
        hung (`int`): a process had not ended in time.
        incomplete (`int`): a folder with the name of a checkpoint was not whole.
        unnoticed (`int`): the survivors did not name the rank that ended.
    """

    trials: int = 0
    survived: int = 0
    refused: int = 0
    lost: int = 0
    hung: int = 0
    incomplete: int = 0
    unnoticed: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.hung or self.incomplete or self.unnoticed)


COLUMNS = tuple(field.name for field in fields(Count))


def table(counts: dict[str, Count]) -> str:
    """As Markdown."""
    lines = ["| fault | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for name, count in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(getattr(count, column)) for column in COLUMNS) + " |")
    return "\n".join(lines)
