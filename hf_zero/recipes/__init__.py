"""Ready-made fine-tunes: `python -m hf_zero.recipes <task> --config <name>.yaml`."""
