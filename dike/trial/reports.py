"""Messages from a trial's process to its executor: one JSON object per line, written to `TrialSpec.report_fd`.

    {"type": "started"}                                  the script is about to run
    {"type": "restored", "path": p, "step": n}           a checkpoint is restored
    {"type": "training", "preemptible": true, "batch_size": n}
                                                         the first step is about to start. preemptible: whether the
                                                         trial can be saved; if not, it only obeys requests to pause.
                                                         batch_size: samples per step, if known
    {"type": "progress", "step": n, "train_s": t, "loss": x, "low": x, "high": x, "last": x, "count": k,
     "metrics": {name: x}, "value": x, "best": x, "best_step": n, "values": [[k, n, x], ...]}
                                                         an interval of training, see below
    {"type": "kept_back", ...}                           the same for an interval that is reported soon: it counts only
                                                         if the process ends before
    {"type": "checkpoint", "path": p, "step": n, "train_s": t}
    {"type": "result", "value": x, "values": {...}, "best": x, "best_step": n}
                                                         return value of the function given to `dike.tune`
    {"type": "bad_input", "message": "one sentence"}     the process ends with EXIT_BAD_INPUT; a retry would not help
    {"type": "failed", "message": "ValueError: ..."}     the script ended with an exception
    {"type": "suspended", "path": p, "step": n}          the last message of a run that ends with EXIT_SUSPENDED
    {"type": "paused", "path": p, "step": n}             the last message of a run whose process waits to be frozen. The
                                                         next run in it begins with `restored` and `training`. `path` is
                                                         null if no checkpoint has the trial's state; then there is no
                                                         `restored`

Fields of `progress`: `step` counts the steps of all runs of the trial, `train_s` their seconds of training. `loss`,
`low`, `high`, `last` and `count` are mean, minimum, maximum, newest and number of the training losses since the last
message, absent if there were none. `metrics` has the newest values of everything else by name, including the results of
epochs. `value` is the newest value of the objective, absent if there is no new one: the epoch's result as Keras prints
it, the metric in `dike.report`, or the loss of the last batch if the script reports neither. `best` and `best_step` are
the best value and its step in all runs of the trial. `"restated": true` revokes the earlier best, because the script
has begun to report values itself, or its function returned another quantity. `values`, in a search that stops trials,
are the values that the script has reported since the last message: its number among all reported values, the step, and
the value; some are omitted if there are very many. How many losses a message covers depends on timing, and so does
their mean; `last`, `value` and `best` do not. Numbers that JSON cannot represent are text: "nan", "inf", "-inf".
"""
