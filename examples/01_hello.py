"""Continue a text with the checkpoint that ships, within 200 MB."""

import sys

import twoends


def main() -> None:
    with twoends.open_model(ram="200MB", context=256) as model:
        model.generate("Once upon a time", num_new=60, on_text=sys.stdout.write)
    print()


if __name__ == "__main__":
    main()
