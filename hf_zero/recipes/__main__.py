import sys

from hf_zero.recipes.cli import main


# The guard matters: processes that the launcher spawns import this module again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
