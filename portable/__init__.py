# SPDX-License-Identifier: Apache-2.0
"""The portable bundle: a folder that runs on a board with nothing of the board's but its kernel and a shell.

`tools/build_portable.py` is the program; this package holds what it is made of:

- `target`: the two architectures
- `debian`, `wheels`, `extensions`: where the parts come from, each into a folder of its own
- `collect`: which of them go into the bundle, and where
- `elf`: what a binary needs; `audit` holds the bundle to it
- `licences`: licence texts, sources and the SBOM
- `bundle`: puts it together; `archive`: the .tar.xz and the single file
- `launcher.sh`, `single.sh`: what the user starts
- `machine`, `verify`: an empty machine, and the bundle tried on it
"""
