"""The table of commands: each is loaded alone, and one that is missing costs the others nothing."""

import sys

import pytest

from gdn_multi import cli


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {name}" in printed for name in cli.COMMANDS)


def test_no_command_and_unknown_command_fail(capsys):
    for argv in ([], ["dance"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
    assert "dance" in capsys.readouterr().err


def test_a_missing_command_says_so_and_leaves_the_others(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "bench", cli.Command("gdn_multi.cli.not_there", "of another installation"))
    assert cli.main(["bench"]) == 2
    assert "not available" in capsys.readouterr().err
    assert cli.main(["doctor", "--json", "--device", "cpu"]) == 0


def test_a_command_imports_only_itself(monkeypatch, capsys):
    for name in list(sys.modules):
        if name.startswith("gdn_multi.cli."):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    assert "gdn_multi.cli.demo" in sys.modules
    assert "gdn_multi.cli.doctor" not in sys.modules


def test_interrupted(monkeypatch, capsys):
    from gdn_multi.cli import doctor

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err
