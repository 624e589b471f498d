"""`python -m hf_trak …` and `accelerate launch -m hf_trak …`: the command line."""

import sys

from hf_trak.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
