"""What a trial's process tells its executor: one JSON object a line, written to `TrialSpec.report_fd`.

    {"type": "started"}                                  the script is about to run
    {"type": "restored", "path": p, "step": n}           a checkpoint has been restored
    {"type": "training", "preemptible": true, "batch_size": n}
                                                         the first step is about to be taken; whether the trial can be
                                                         saved, else it obeys only a request to stay in memory; samples
                                                         of a step, where that is known
    {"type": "progress", "step": n, "train_s": t, "loss": x, "low": x, "high": x, "last": x, "count": k,
     "metrics": {name: x}, "value": x, "best": x, "best_step": n, "values": [[k, n, x], ...]}
                                                         a stretch of training, see below
    {"type": "kept_back", ...}                           the same of a stretch that will be reported soon: it counts if
                                                         the process ends before
    {"type": "checkpoint", "path": p, "step": n, "train_s": t}
    {"type": "result", "value": x, "values": {...}, "best": x, "best_step": n}
                                                         what the function given to `dike.tune` returned
    {"type": "bad_input", "message": "one sentence"}     the process ends with EXIT_BAD_INPUT; a retry would not help
    {"type": "failed", "message": "ValueError: ..."}     the script ended with an exception
    {"type": "suspended", "path": p, "step": n}          the last line of a run that ends with EXIT_SUSPENDED
    {"type": "paused", "path": p, "step": n}             the last line of a run whose process stays, and waits to be
                                                         stopped; `restored` and `training` begin the next run in it.
                                                         `path` is null if no checkpoint holds the trial's state; then
                                                         there is no `restored` either

In `progress`: `step` counts the steps of all runs of the trial; `train_s` the seconds it has trained in all runs;
`loss`, `low`, `high`, `last` and `count` describe the training losses since the last such line (mean, least, greatest,
newest, number) and are absent where there were none; `metrics` are the newest values of everything else by name, an
epoch's results among them. `value` is the objective's newest value, absent where there is no new one: the epoch's
result as Keras prints it, the metric in `dike.report`, or, of a script that reports nothing of the kind, the loss of
its last batch. `best` and `best_step` are the best one so far and the step at which it was said, in all runs of the
trial; `"restated": true` takes back what was said of the best before, because the script has begun to report numbers
itself, or its function has returned one that is something else. `values`, in a search that stops trials, are those
that the script has reported since the last such line: how many it has reported up to there in all runs, the step, and
the value; of very many some are left out. How many losses a line describes is a matter of time, and so
is their mean; `last`, `value` and `best` are not. A number that JSON cannot hold is written as text: "nan",
"inf", "-inf".
"""
