# plot.awk: reads the log of one run and writes the curves and facts that scripts/plot draws.
#
#   awk -v to=PREFIX -f plot.awk log.jsonl > FACTS
#
# Writes a file PREFIX.CURVE per curve, with "x y" on each line and an empty line where
# the curve is interrupted: where a value is null, and where the run was resumed, because
# x may then jump back. PREFIX.CURVE.alone holds isolated points, which would draw no
# line. PREFIX.CURVE.marks holds these and a few points along the curve, for markers.
# Standard output is the table of facts, "key TAB value".
#
# A curve of more than MOST points is thinned out: each point is the mean of equally many
# neighbours, and null if one of them is.
#
# The log is JSON without spaces (runtime/log.h). So "key": with its quotes can only be a
# key, because quotes inside a string are escaped. An incomplete last line is still being
# written and is ignored; other lines that cannot be read are counted.
BEGIN { MOST = 200; MARKS = 7 }

{ unreadable += torn; torn = 0 }
# After a crash of the machine a partial line may stand in front of a complete one.
sub(/^.+\{"event":"/, "{\"event\":\"") { unreadable++ }
!/^\{"event":".*\}$/ { torn = 1; next }
/^\{"event":"start"/ { begin($0) }
/^\{"event":"resume"/ { commit = value($0, "commit"); resumed = 1 }
/^\{"event":"rollback"/ { lift(); commit = value($0, "commit") }
/^\{"event":"report"/ { report($0) }
/^\{"event":"validation"/ { validation($0) }
/^\{"event":"end"/ { fact["end"] = value($0, "reason") }

END {
    if (validated) { losses("best", fact["most_tokens"], fact["most_time"], fact["best"]) }
    if ("tokens" in fact) { fact["most_end"] = fact["most_tokens"] }
    if ("tokens" in fact && fact["end"] != "done" && fact["end"] != "no lower loss") { future() }
    for (c in count) { draw(c) }
    if (unreadable > 0) { fact["unreadable"] = unreadable }
    if (whole > 0) { fact["exposed"] = 100 * waited / whole }
    for (key in fact) { print key "\t" fact[key] }
}

# The value of a key: a number, or a string without its quotes; "" for null and for a
# missing key.
function value(line, key,    at) {
    at = index(line, "\"" key "\":")
    if (at == 0) { return "" }
    line = substr(line, at + length(key) + 3)
    if (match(line, /^-?[0-9][0-9.eE+-]*/)) { return substr(line, 1, RLENGTH) }
    if (match(line, /^"([^"\\]|\\.)*"/)) { return substr(line, 2, RLENGTH - 2) }
    return ""
}

# Interrupts all curves here, except a best possible loss that is constant.
function lift(    c) {
    for (c in count) { if (!validated || c !~ /^best/) { add(c, 0, "") } }
}

# A start event: a run begins, or is resumed in the same file.
function begin(line,    options, kept, i) {
    lift()
    commit = 0
    options = substr(line, index(line, "\"options\":{"))
    fact["rule"] = value(options, "optimizer")
    fact["model"] = value(substr(line, 1, length(line) - length(options)), "model") # older logs have it in the options only
    if (fact["model"] == "") { fact["model"] = value(options, "from") != "" ? value(options, "from") : value(options, "model") }
    fact["wire"] = value(options, "wire")
    fact["link"] = value(options, "link-mbit")
    split("lr min-lr schedule decay-tokens tokens warmup", kept, " ")
    for (i in kept) { asked[kept[i]] = value(options, kept[i]) }
    fact["parameters"] = value(line, "parameters")
    fact["device"] = value(line, "device")
    fact["ranks"] = gsub(/"pid":/, "", line)
    fact["end"] = ""
}

# Adds a point to a curve; an empty y interrupts it.
function add(c, x, y) {
    count[c]++
    xs[c, count[c]] = x
    ys[c, count[c]] = y
}

function losses(kind, tokens, seconds, loss) {
    add(kind "-tokens", tokens, loss)
    add(kind "-time", seconds, loss)
}

function share(part, whole_ms) { return part == "" || whole_ms == "" ? "" : 100 * part / whole_ms }

function report(line,    tokens, seconds, speed, exposed, ms, now) {
    fact["resumed"] += resumed # a finished run may be resumed and have nothing to do
    resumed = 0
    tokens = value(line, "tokens")
    seconds = value(line, "seconds")
    speed = value(line, "tokens_per_second")
    exposed = value(line, "exposed_ms")
    now = value(line, "commit")
    ms = speed + 0 > 0 ? 1e3 * value(line, "grads_per_commit") * tokens / value(line, "grads") / speed : "" # time per commit
    losses("train", tokens, seconds, value(line, "loss"))
    if (!validated) { losses("best", tokens, seconds, value(line, "perfect_loss")) }
    add("speed", tokens, speed)
    add("norm", tokens, value(line, "grad_norm"))
    add("rate", tokens, value(line, "lr"))
    add("communication", tokens, share(value(line, "communication_ms"), ms))
    add("exposed", tokens, share(exposed, ms))
    if (exposed != "" && ms != "") {
        waited += exposed * (now - commit)
        whole += ms * (now - commit)
    }
    commit = now
    commit_tokens = tokens / value(line, "grads") * value(line, "grads_per_commit")
    reached(now, tokens, seconds)
    fact["loss"] = value(line, "loss")
}

# The learning rate from the last report to the end of the run, as learning_rate_at in
# scheduler/optimizer.h has it.
function future(    i, t, here, there, begins, warmup, part, fall) {
    here = fact["tokens"] + 0
    there = asked["tokens"] + 0
    warmup = asked["warmup"] * commit_tokens
    begins = asked["decay-tokens"] + 0 > 0 && there - asked["decay-tokens"] > warmup ? there - asked["decay-tokens"] : warmup
    for (i = 0; i <= 60 && there > here; i++) {
        t = here + (there - here) * i / 60
        part = t > begins && there > begins ? (t - begins) / (there - begins) : 0
        fall = asked["schedule"] == "constant" ? 0 : asked["schedule"] == "linear" ? part : asked["schedule"] == "wsd" ? sqrt(part) : (1 - cos(3.14159265 * part)) / 2
        fact["most_end"] = there
        add("future", t, t < warmup ? asked["lr"] * t / warmup : asked["lr"] - (asked["lr"] - asked["min-lr"]) * fall)
    }
}

# The best possible loss of training batches varies from batch to batch. That of the
# held-out text is constant, so it is drawn if known.
function validation(line,    tokens, seconds, best) {
    tokens = value(line, "tokens")
    seconds = value(line, "seconds")
    best = value(line, "perfect_loss")
    losses("held", tokens, seconds, value(line, "loss"))
    if (best != "") {
        if (!validated) { count["best-tokens"] = count["best-time"] = 0; losses("best", 0, 0, best) }
        validated = 1
        losses("best", tokens, seconds, best)
        fact["best"] = best
    }
    reached(value(line, "commit"), tokens, seconds)
    fact["held"] = value(line, "loss")
}

# The last report is not always the furthest: a resumed run may have gone back. The furthest
# keeps all its digits: an axis that ends at a rounded one would leave out the last point.
function reached(now, tokens, seconds) {
    fact["commits"] = now
    fact["tokens"] = tokens
    fact["seconds"] = seconds
    if (tokens + 0 > fact["most_tokens"] + 0) { fact["most_tokens"] = tokens }
    if (seconds + 0 > fact["most_time"] + 0) { fact["most_time"] = seconds }
}

# Writes a curve as means of neighbours, separately for each uninterrupted stretch.
function draw(c,    i, every, held, sum, known, n) {
    every = int((count[c] + MOST - 1) / MOST)
    n = held = sum = 0
    known = 1
    for (i = 1; i <= count[c]; i++) {
        held++
        if (ys[c, i] == "") { known = 0 } else { sum += ys[c, i] }
        if (known && held < every && i < count[c]) { continue }
        n++
        x[n] = xs[c, i]
        y[n] = known ? sum / held : ""
        held = sum = 0
        known = 1
    }
    write_curve(to "." c, n)
}

function write_curve(file, n,    i, every, alone) {
    every = int((n + MARKS - 1) / MARKS)
    for (i = 1; i <= n; i++) {
        if (y[i] == "") { print "" > file; continue }
        print x[i], y[i] > file
        alone = (i == 1 || y[i - 1] == "") && (i == n || y[i + 1] == "")
        if (alone) { print x[i], y[i] > (file ".alone") }
        if (alone || i % every == int((every + 1) / 2) % every) { print x[i], y[i] > (file ".marks") }
    }
    close(file)
    close(file ".marks")
    close(file ".alone")
}
