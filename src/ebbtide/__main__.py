"""The entry point of the `ebbtide` command and of `python -m ebbtide`."""

from ebbtide.system import signals


def main() -> None:
    signals.exit_on_signal(lambda: "stopped before the first step")  # importing the commands alone takes a second
    from ebbtide.cli import main as command

    command()


if __name__ == "__main__":
    main()
