import subprocess
import sys
from pathlib import Path

from training_toys import Regression, evaluations, losses, quick, weights_equal

import seps
from seps.training import train

SCRIPT = """
import sys
from pathlib import Path
from training_toys import Regression, quick, send
from seps.training import train
import signal
train(Regression(at_step={7: send(signal.SIGKILL)}), quick(checkpoint_every=3), Path(sys.argv[1]))
"""


def test_run_killed_without_warning_resumes_to_the_same_losses(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(seps.__file__).parents[1])]
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {paths!r}\n{SCRIPT}",
        str(tmp_path / "killed"),
    ]
    ended = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert ended.returncode == -9, ended.stderr.decode()
    assert [step for step, _, _ in losses(tmp_path / "killed")] == list(range(1, 8))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    resumed, whole = Regression(), Regression()
    result = train(resumed, quick(checkpoint_every=3), tmp_path / "killed")
    train(whole, quick(), tmp_path / "whole")
    assert result.resumed_from == 6
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert evaluations(tmp_path / "killed") == evaluations(tmp_path / "whole")
    assert weights_equal(resumed.model, whole.model)
