"""`python -m halting_bench` is the same as `halting-bench`."""

from halting_bench.cli.main import main

if __name__ == "__main__":
    main()
