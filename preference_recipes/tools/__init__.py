"""Commands around a run."""

import sys


def show_preview(accelerator, args, data) -> None:
    """With `--preview N`, prints the first N rows of each training set, and ends the run.

    All processes must call it, before any model is loaded.
    """
    if args.preview:
        from common import distributed
        from preference_recipes.tools import preview

        distributed.on_main_process(accelerator, preview.print_preview, args, data)
        sys.exit(0)
