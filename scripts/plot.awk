# plot.awk: what scripts/plot draws of one run.
#
#   awk -v to=PREFIX -f plot.awk log.jsonl > FACTS
#
# Writes a file PREFIX.CURVE per curve, "x y" per line, with an empty line where the pen is lifted: where a value is null, and where the run
# was resumed, since what follows may begin further back. PREFIX.CURVE.alone holds the points that stand alone and would make no line, and
# PREFIX.CURVE.marks these and a few along the way. What goes to standard output is the table of facts, "key TAB value".
#
# A curve of more than MOST points is drawn as means of as many neighbours each, and a mean with a null in it is null.
#
# The log is JSON without spaces (runtime/log.h), so "key": with its quotes stands for a key only: quotes inside of a string have a
# backslash before them. A line that is not whole is being written, and is left for the next time.
BEGIN { MOST = 200; MARKS = 7 }

# After a crash of the machine a half line may stand before a whole one.
{ sub(/^.*\{"event":"/, "{\"event\":\"") }
!/^\{"event":".*\}$/ { next }
/^\{"event":"start"/ { begin($0) }
/^\{"event":"resume"/ { commit = value($0, "commit"); fact["resumed"]++ }
/^\{"event":"rollback"/ { lift(); commit = value($0, "commit") }
/^\{"event":"report"/ { report($0) }
/^\{"event":"validation"/ { validation($0) }
/^\{"event":"end"/ { fact["end"] = value($0, "reason") }

END {
    if (validated) { losses("best", fact["most_tokens"], fact["most_time"], fact["best"]) }
    for (c in count) { draw(c) }
    if (whole > 0) { fact["exposed"] = 100 * waited / whole }
    for (key in fact) { print key "\t" fact[key] }
}

# A number, or what is between the quotes of a string; "" for null and for a key that is not there.
function value(line, key,    at) {
    at = index(line, "\"" key "\":")
    if (at == 0) { return "" }
    line = substr(line, at + length(key) + 3)
    if (match(line, /^-?[0-9][0-9.eE+-]*/)) { return substr(line, 1, RLENGTH) }
    if (match(line, /^"([^"\\]|\\.)*"/)) { return substr(line, 2, RLENGTH - 2) }
    return ""
}

# The curves break here, but for a best loss that is one number.
function lift(    c) {
    for (c in count) { if (!validated || c !~ /^best/) { add(c, 0, "") } }
}

# A run begins, or is resumed in the same file.
function begin(line,    options) {
    lift()
    commit = 0
    options = substr(line, index(line, "\"options\":{"))
    fact["rule"] = value(options, "optimizer")
    fact["model"] = value(options, "from") != "" ? value(options, "from") : value(options, "model")
    fact["wire"] = value(options, "wire")
    fact["link"] = value(options, "link-mbit")
    fact["parameters"] = value(line, "parameters")
    fact["device"] = value(line, "device")
    fact["ranks"] = gsub(/"pid":/, "", line)
    fact["end"] = ""
}

# A point of a curve; y "" lifts the pen.
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
    tokens = value(line, "tokens")
    seconds = value(line, "seconds")
    speed = value(line, "tokens_per_second")
    exposed = value(line, "exposed_ms")
    now = value(line, "commit")
    ms = speed + 0 > 0 ? 1e3 * value(line, "grads_per_commit") * tokens / value(line, "grads") / speed : "" # of a commit, all in all
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
    reached(now, tokens, seconds)
    fact["loss"] = value(line, "loss")
}

# The best loss on the batch at hand wavers; that on the held-out text is one number, and where it is known it is drawn instead.
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

# The last is not always the furthest: a resumed run may have gone back.
function reached(now, tokens, seconds) {
    fact["commits"] = now
    fact["tokens"] = tokens
    fact["seconds"] = seconds
    if (tokens + 0 > fact["most_tokens"] + 0) { fact["most_tokens"] = tokens + 0 }
    if (seconds + 0 > fact["most_time"] + 0) { fact["most_time"] = seconds + 0 }
}

# Means of neighbours, piece by piece: a piece is what is drawn without lifting the pen.
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
