"""Conversions onto a disk that is really full: a small tmpfs in a mount namespace of the test's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from mdsp.cli import main

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
CONVERT = f"{sys.executable} -m mdsp convert"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode != 0,
    reason="needs a mount namespace",
)
@pytest.mark.parametrize("direction", ["from-hf", "to-hf"])
def test_the_same_command_finishes_once_there_is_room(direction: str, tmp_path: Path) -> None:
    """Refused at once when the tensors do not fit; stopped by the disk when only the rest does not."""
    source = tmp_path / "source"
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    if direction == "to-hf":
        assert main(["convert", "from-hf", str(source), str(tmp_path / "sharded"), "--tensor", "2"]) == 0
        source = tmp_path / "sharded"
    degrees = "--tensor 2 --pipeline 2" if direction == "from-hf" else ""
    wanted = tmp_path / "undisturbed"
    assert main(["convert", direction, str(source), str(wanted), *degrees.split()]) == 0
    tensors = sum(path.stat().st_size for path in wanted.rglob("*") if path.suffix in (".pt", ".safetensors"))
    disk = tmp_path / "disk"
    disk.mkdir()
    # Tensor bytes pass the check of the free space; the blocks and directories around them do not fit any more.
    script = f"""
        mount -t tmpfs -o size=4k tmpfs {disk}
        {CONVERT} {direction} {source} {disk}/out {degrees}; echo "exit $?"
        mount -o remount,size={tensors // 4096 * 4096 + 4096} {disk}
        {CONVERT} {direction} {source} {disk}/out {degrees}; echo "exit $?"
        ls {disk}
        {CONVERT} show {disk}/out; echo "exit $?"
        mount -o remount,size=100m {disk}
        {CONVERT} {direction} {source} {disk}/out {degrees} >/dev/null; echo "exit $?"
        cp -r {disk}/out {tmp_path}/out
    """
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert exits == ["exit 2", "exit 2", "exit 2", "exit 0"], said
    assert "B free" in said
    assert "No space left" in said
    assert "Traceback" not in said
    assert "unfinished; run the same command again" in said
    assert "out.partial" in done.stdout.splitlines() and "out" not in done.stdout.splitlines()
    assert contents(tmp_path / "out") == contents(wanted)
