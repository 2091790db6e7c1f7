"""How long a row may be, by the positions that a model has; read off its config, before it is loaded."""

from transformers import AutoConfig

from hf_zero.errors import ConfigError
from hf_zero.recipes.common import SourceArguments
from hf_zero.recipes.loading import quiet
from hf_zero.recipes.models import resolve_model


# Their positions begin behind the number of the token that pads: so many of them no token can have.
BEHIND_PADDING = frozenset(
    "camembert data2vec-text ibert lilt longformer luke mpnet roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl xmod".split()
)


def num_positions(arguments: SourceArguments) -> int | None:
    """How many tokens of a row the model tells apart by their positions; `None` where there is no limit.

    Args:
        arguments ([`SourceArguments`]): with the name of the model.

    Raises:
        ConfigError: its config does not load.
    """
    name = arguments.model_name_or_path
    try:
        with quiet():
            config = AutoConfig.from_pretrained(resolve_model(name), revision=arguments.model_revision or "main")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: its config does not load ({str(error).strip().splitlines()[0]})") from error
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    if not found or found < 0 or not getattr(text, "position_biased_input", True):  # relative positions alone
        return None
    return found - (text.pad_token_id or 0) - 1 if text.model_type in BEHIND_PADDING else found


def check_positions(arguments: SourceArguments, max_length: int | None) -> None:
    """Refuses rows that are longer than the model takes.

    Args:
        arguments ([`SourceArguments`]): with the name of the model.
        max_length (`int`, *optional*): of the rows, in tokens.

    Raises:
        ConfigError: naming both.
    """
    limit = num_positions(arguments)
    if limit is not None and max_length is not None and max_length > limit:
        raise ConfigError(
            f"max_length {max_length}: {arguments.model_name_or_path} has {limit} positions; set --max_length {limit} "
            "or less"
        )
