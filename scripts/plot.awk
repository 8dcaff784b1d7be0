# plot.awk: reads the tables of runs and writes what scripts/plot draws. A picture is made by
# gnuplot from `commands` and the curves; a page has the other files, too.
#
#   awk -v to=DIR [-v terminal=TERMINAL [-v unit=UNIT]] -f plot.awk n=1 RUN/run.tsv RUN/progress.tsv n=2 ...
#
# DIR/names has the name of a run on each line. TERMINAL: gnuplot's, of a picture with all panels;
# UNIT: what a pixel is in its size. Writes into DIR:
#
#   N.CURVE       "x y" on each line, and an empty line where the curve is interrupted: where a value is not known,
#                 and where the run was resumed or rolled back, because x may then jump back
#   N.CURVE.alone isolated points, which would draw no line; N.CURVE.marks: these and a few along the curve, for markers
#   commands      gnuplot's, for all panels; PANEL.titles: the run of each line of its plot
#   rows, badges, colours, panels     what the page has besides; rows only of runs that have a report or a validation
#
# A curve of more than MOST points is thinned out: each point is the mean of equally many
# neighbours, and not known if one of them is not. An incomplete last line is still being
# written and is ignored; other lines that cannot be read are counted, and interrupt the curves.
BEGIN {
    FS = "\t"
    MOST = 200; MARKS = 7
    while ((getline name < (to "/names")) > 0) { shown[++runs] = name; if (length(name) > longest) { longest = length(name) } }
    # Of each run: colour on a white page, on a dark page, gnuplot's marker, the same as a character. Any two
    # colours of one column are at least 20 apart in CIELAB, also as seen with red or green colour blindness.
    looks = split("#004790 #217bee 7 ●|#f2790b #f9c984 5 ■|#01aa61 #1f995c 9 ▲|#9a3d59 #e39bcb 13 ◆|" \
        "#974f00 #ecde4c 11 ▼|#206ed4 #82b3fc 6 ○|#20242a #e6e8eb 4 □|#858c96 #7e838b 8 △", look, "|")
    for (i = 1; i <= looks; i++) { split(look[i], part, " "); light[i] = part[1]; dark[i] = part[2]; marker[i] = part[3]; sign[i] = part[4] }
}

n != run { finish(); run = n }
FNR == 1 { torn = 0; columns = 0 }
{ unreadable += torn; torn = 0 }

FILENAME ~ /run\.tsv$/ && NF == 2 {
    if ($1 == "start.event") { fact["end.reason"] = fact["end.commit"] = "" }
    if ($1 == "resume.commit") { resumed++ }
    # A finished run may be resumed and have nothing to do.
    if ($1 == "end.commit" && $2 == fact["resume.commit"]) { resumed-- }
    fact[$1] = $2
    next
}
FILENAME !~ /run\.tsv$/ && FNR == 1 {
    for (i = 1; i <= NF; i++) { at[$i] = i }
    columns = "steps" in at ? NF : 0 # those of an early version had few columns
    next
}
$0 == "" { lift(); next }
NF != columns || columns == 0 { torn = 1; lift(); next }
cell("steps") != "" { report() }
cell("steps") == "" { validation() }

END { finish(); draw_all() }

# The value in a column of this row; "" where it is not known.
function cell(name) { return $at[name] == "nan" ? "" : $at[name] }

# ----------------------------------------------------------------------------------------
# A run

# Adds a point to a curve; an empty y interrupts it.
function add(c, x, y) {
    count[c]++
    xs[c, count[c]] = x
    ys[c, count[c]] = y
}

# Interrupts all curves here, except a best possible loss that is constant.
function lift(    c) {
    for (c in count) { if (fact["best"] == "" || c !~ /^best/) { add(c, 0, "") } }
}

function losses(kind, tokens, seconds, loss) {
    add(kind "-tokens", tokens, loss)
    add(kind "-time", seconds, loss)
}

function share(part, whole_ms) { return part == "" || whole_ms == "" ? "" : 100 * part / whole_ms }

function report(    tokens, speed, each, ms) {
    tokens = cell("tokens")
    speed = cell("tokens_per_second")
    each = cell("grads") + 0 > 0 ? cell("grads_per_commit") * tokens / cell("grads") : 0 # tokens of a commit
    ms = speed + 0 > 0 ? 1e3 * each / speed : ""
    losses("train", tokens, cell("seconds"), cell("loss"))
    if (fact["best"] == "") { losses("best", tokens, cell("seconds"), cell("perfect_loss")) }
    add("speed", tokens, speed)
    add("norm", tokens, cell("grad_norm"))
    add("rate", tokens, cell("lr"))
    add("communication", tokens, share(cell("communication_ms"), ms))
    add("exposed", tokens, share(cell("exposed_ms"), ms))
    if (ms != "") {
        waited += cell("exposed_ms") * cell("steps")
        whole += ms * cell("steps")
    }
    fact["each"] = each
    fact["loss"] = cell("loss")
    reached()
}

# The best possible loss of training batches varies from batch to batch. That of the
# held-out text is constant, so it is drawn if known.
function validation(    best) {
    best = cell("perfect_loss")
    losses("held", cell("tokens"), cell("seconds"), cell("validation_loss"))
    if (best != "") {
        if (fact["best"] == "") { count["best-tokens"] = count["best-time"] = 0; losses("best", 0, 0, best) }
        fact["best"] = best
        losses("best", cell("tokens"), cell("seconds"), best)
    }
    fact["held"] = cell("validation_loss")
    reached()
}

# The last row is not always the furthest: a resumed run may have gone back. The furthest
# keeps all its digits: an axis that ends at a rounded one would leave out the last point.
function reached() {
    fact["commits"] = cell("commit")
    fact["tokens"] = cell("tokens")
    fact["seconds"] = cell("seconds")
    if (fact["tokens"] + 0 > far_tokens + 0) { far_tokens = fact["tokens"] }
    if (fact["seconds"] + 0 > far_time + 0) { far_time = fact["seconds"] }
}

function asked(option) { return fact["start.options." option] }

# The learning rate from the last report to the end of the run, as learning_rate_at in
# scheduler/optimizer.h has it.
function future(    i, t, here, there, begins, warmup, part, fall) {
    here = fact["tokens"] + 0
    there = asked("tokens") + 0
    warmup = asked("warmup") * fact["each"]
    begins = asked("decay-tokens") + 0 > 0 && there - asked("decay-tokens") > warmup ? there - asked("decay-tokens") : warmup
    for (i = 0; i <= 60 && there > here; i++) {
        t = here + (there - here) * i / 60
        part = t > begins && there > begins ? (t - begins) / (there - begins) : 0
        fall = asked("schedule") == "constant" ? 0 : asked("schedule") == "linear" ? part : asked("schedule") == "wsd" ? sqrt(part) : (1 - cos(3.14159265 * part)) / 2
        add("future", t, t < warmup ? asked("lr") * t / warmup : asked("lr") - (asked("lr") - asked("min-lr")) * fall)
        widen("end", there)
    }
}

function widen(axis, x) { if (x + 0 > most[axis] + 0) { most[axis] = x } }

# Ends the run whose tables have been read.
function finish(    c) {
    if (run == "") { return }
    if (fact["best"] != "") { losses("best", far_tokens, far_time, fact["best"]) }
    widen("tokens", far_tokens); widen("end", far_tokens); widen("time", far_time)
    if (far_tokens != "" && fact["end.reason"] != "done" && fact["end.reason"] != "no lower loss") { future() }
    for (c in count) { draw(c) }
    print_row()
    split("", fact); split("", count); split("", at)
    unreadable = resumed = waited = whole = 0
    far_tokens = far_time = ""
}

# Writes a curve as means of neighbours, separately for each uninterrupted stretch.
function draw(c,    i, every, held, sum, known, m) {
    every = int((count[c] + MOST - 1) / MOST)
    m = held = sum = 0
    known = 1
    for (i = 1; i <= count[c]; i++) {
        held++
        if (ys[c, i] == "") { known = 0 } else { sum += ys[c, i] }
        if (known && held < every && i < count[c]) { continue }
        x[++m] = xs[c, i]
        y[m] = known ? sum / held : ""
        held = sum = 0
        known = 1
    }
    write_curve(c, to "/" run "." c, m)
}

function write_curve(c, file, m,    i, every, alone) {
    every = int((m + MARKS - 1) / MARKS)
    printf "" > file
    for (i = 1; i <= m; i++) {
        if (y[i] == "") { print "" > file; continue }
        print x[i], y[i] > file
        has[run, c] = 1
        if (!(c in low) || y[i] < low[c]) { low[c] = y[i] }
        if (!(c in high) || y[i] > high[c]) { high[c] = y[i] }
        alone = (i == 1 || y[i - 1] == "") && (i == m || y[i + 1] == "")
        if (alone) { print x[i], y[i] > (file ".alone"); has[run, c ".alone"] = 1 }
        if (alone || i % every == int((every + 1) / 2) % every) { print x[i], y[i] > (file ".marks"); has[run, c ".marks"] = 1 }
    }
    close(file); close(file ".marks"); close(file ".alone")
}

# ----------------------------------------------------------------------------------------
# The row of a run in the page's table. A dash stands for what is not known.

function escaped(text) { gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text); gsub(/"/, "\\&quot;", text); return text }
function badge(i) { return "<span class=\"run-" i "\">" sign[i] "</span>&nbsp;" escaped(shown[i]) }
function td(text, more) { return "<td>" (text == "" ? "–" : escaped(text)) (more == "" ? "" : "<small>" escaped(more) "</small>") "</td>\n" }
function known(format, x) { return x == "" ? "" : sprintf(format, x) }

function human(x,    unit) {
    if (x == "") { return "" }
    for (unit = 1; x >= 999.5 && unit < 5; unit++) { x /= 1000 }
    if (unit == 1) { return int(x + 0.5) }
    return sprintf(x < 9.995 ? "%.2f" : x < 99.95 ? "%.1f" : "%.0f", x) substr(" kMGT", unit, 1)
}

function duration(s) { s = int(s + 0.5); return sprintf("%d:%02d:%02d", s / 3600, s / 60 % 60, s % 60) }

function print_row(    more) {
    more = resumed > 0 ? "resumed: " resumed : ""
    if (unreadable > 0) { more = more (more == "" ? "" : "; ") "lines of its tables that cannot be read: " unreadable }
    print "<tr><th scope=\"row\">" badge(run) "</th>\n" \
        td(asked("optimizer"), asked("wire") (asked("link-mbit") + 0 > 0 ? ", " asked("link-mbit") + 0 " Mbit/s" : "")) \
        td(fact["start.ranks"], fact["start.ranks.0.device"]) td(human(fact["start.parameters"]), fact["start.model"]) \
        td(human(fact["tokens"]), known("%d commit" (fact["commits"] == 1 ? "" : "s"), fact["commits"])) td(fact["seconds"] == "" ? "" : duration(fact["seconds"])) \
        td(fact["seconds"] + 0 > 0 ? human(fact["tokens"] / fact["seconds"]) : "") td(known("%.4f", fact["loss"])) \
        td(known("%.4f", fact["held"]), known("best possible %.4f", fact["best"])) \
        td(known("%.1f %%", whole > 0 ? 100 * waited / whole : "")) \
        td(fact["end.reason"] == "" ? "no end yet" : fact["end.reason"], more) "</tr>" > (to "/rows")
}

# ----------------------------------------------------------------------------------------
# Axes

# About five ticks from 0 to top, with labels such as 500k and 1M.
function ticks(top,    ten, step, tick, text) {
    for (ten = 1; ten * 10 <= top / 5; ) { ten *= 10 }
    step = top / 5 > 5 * ten ? 10 * ten : top / 5 > 2 * ten ? 5 * ten : top / 5 > ten ? 2 * ten : ten
    text = "\"0\" 0"
    for (tick = step; tick <= top * 1.0001; tick += step) { text = text sprintf(", \"%s\" %.0f", round(tick), tick) }
    return text
}

function round(x) { return x >= 1e9 ? x / 1e9 "G" : x >= 1e6 ? x / 1e6 "M" : x >= 1e3 ? x / 1e3 "k" : x "" }

# By default gnuplot labels only powers of ten on a logarithmic axis.
function log_ticks(span,    i, m, k, ten, text) {
    k = split(span < 8 ? "1 1.5 2 3 4 5 7" : span < 300 ? "1 2 5" : "1", m, " ")
    for (ten = 1e-9; ten < 1e10; ten *= 10) { for (i = 1; i <= k; i++) { text = text (text == "" ? "" : ", ") sprintf("%g", m[i] * ten) } }
    return text
}

function x_axis(axis,    top, label, unit) {
    top = most[axis] + 0 > 0 ? most[axis] : 1
    label = axis != "time" ? "tokens" : top > 86400 * 3 ? "days" : top > 3600 * 3 ? "hours" : top > 60 * 5 ? "minutes" : "seconds"
    unit = label == "minutes" ? 60 : label == "hours" ? 3600 : label == "days" ? 86400 : 1
    if (axis != "time") { print "set xtics (" ticks(top) ")" > commands }
    print "x(seconds) = seconds / " unit ".; set xlabel '" label "'; set xrange [0:x(" top ")]" > commands
}

# kind: fit, the range of the data, or zero, from 0. top is "" where nothing is known.
function y_axis(kind,    span) {
    if (top == "") {
        print "set label 'nothing is known yet' at graph 0.5, graph 0.5 center; set yrange [0:1]; unset ytics" > commands
    } else if (kind == "zero") {
        print (top > 0 ? "set yrange [0:*] noextend; set offsets 0, 0, graph 0.06, 0" : "set yrange [0:1]") > commands
        if (top >= 1000) { print "set ytics (" ticks(top) ")" > commands }
    } else {
        print "set yrange [*:*] noextend; set offsets 0, 0, graph 0.06, graph 0.06" > commands
        span = least > 0 ? top / least : 0
        if (span > 4) { print "set logscale y; set format y '%g'; set ytics (" log_ticks(span) ")" > commands }
    }
}

# ----------------------------------------------------------------------------------------
# Panels

# Adds this curve of all runs to `plots`.
function curves(style, c,    i, line) {
    for (i = 1; i <= runs; i++) {
        line = style == "dashed" ? "1.2 dashtype 2 linecolor rgb '" light[i] "'" : style == "thin" ? "1.1 linecolor rgb '#70" substr(light[i], 2) "'" : "1.8 linecolor rgb '" light[i] "'"
        entry(i, c, "lines linewidth " line)
        entry(i, c (style == "thick" ? ".marks" : ".alone"), "points pointtype " marker[i] " pointsize 0.7 linewidth 1.5 linecolor rgb '" light[i] "'")
    }
}

function entry(i, c, style) {
    if (!((i, c) in has)) { return }
    plots = plots "'" i "." c "' using (x($1)):2 with " style ", "
    print escaped(shown[i]) > titles
}

# Widens the y axis of a panel, from least to top, to this curve of all runs.
function include(c) {
    if (!(c in low)) { return }
    if (least == "" || low[c] < least) { least = low[c] }
    if (top == "" || high[c] > top) { top = high[c] }
}

# x: tokens, time, or end (tokens, also those to come). thin, thick, dashed: curves.
function panel(id, heading, x, kind, label, thin, thick, dashed, text,    far) {
    titles = to "/" id ".titles"
    printf "" > titles
    if (terminal == "") {
        print "reset; set output '" id ".svg'\nset terminal svg size 480,320 dynamic noenhanced name '" id "' font 'system-ui,sans-serif,14'" > commands
    } else {
        print "reset; set origin " panels % 2 " * 0.5, (2 - " int(panels / 2) ") * 340. / " height "; set size 0.5, 340. / " height "\nset title '" heading "'" > commands
    }
    panels++
    least = top = ""
    include(thin); include(thick)
    # A best loss that is below half of all others is written, not drawn.
    if (top != "" && (dashed in low) && low[dashed] < least / 2) { far = sprintf("%.6g", low[dashed]); dashed = "" }
    include(dashed)
    print "unset key\nset border 3 linewidth 0.7\nset tics nomirror scale 0.4\nset grid linewidth 0.5 linecolor rgb '#7a8594' dashtype 3\nset rmargin 2.5\nset ylabel '" label "'" > commands
    x_axis(x)
    y_axis(kind)
    if (far != "") { print "set label 'the best possible, " far ", is far below' at graph 0.98, graph 0.94 right" > commands }
    plots = ""
    curves("dashed", dashed); curves("thin", thin); curves("thick", thick)
    print "plot " plots "NaN" > commands
    close(titles)
    print id "\t" heading "\t" text > (to "/panels")
}

# The legend above a picture: the names of all runs, in as many columns as the longest allows.
function draw_names(    i, in_a_row, above, name, list) {
    in_a_row = int(130 / (longest + 8))
    if (in_a_row < 1) { in_a_row = 1 }
    above = int((runs + in_a_row - 1) / in_a_row) * 22 + 44
    height = 3 * 340 + above
    for (i = 1; i <= runs; i++) {
        name = shown[i]
        gsub(/'/, "''", name)
        list = list "NaN with linespoints linewidth 2 pointtype " marker[i] " linecolor rgb '" light[i] "' title '" name "', "
    }
    print "set terminal " terminal " size 1200" unit "," height unit " noenhanced background 'white'\nset multiplot\n" \
        "set origin 0, 1 - " above ". / " height "; set size 1, " above ". / " height "\nset margins 0, 0, 0, 0\n" \
        "set key at screen 0.5, screen 1 - 8. / " height " center top horizontal maxcols " in_a_row " samplen 2 Left reverse\n" \
        "unset border; unset tics\nset xrange [0:1]; set yrange [0:1]\n" \
        "set label 'thin: training loss, all communication    thick: validation loss, exposed communication    dashed: the best possible, the rate to come'" \
        " at screen 0.5, screen 1 - (" above ". - 14) / " height " center\nplot " list "NaN notitle" > commands
}

function draw_all(    i) {
    commands = to "/commands"
    print "set encoding utf8" > commands
    if (terminal != "") { draw_names() }
    panel("loss_tokens", "Loss against tokens", "tokens", "fit", "loss, nats per token", "train-tokens", "held-tokens", "best-tokens", \
        "Thin: training loss. Thick: loss on held-out text. Dashed: what a perfect model would reach, where that is known and near.")
    panel("loss_time", "Loss against time", "time", "fit", "loss, nats per token", "train-time", "held-time", "best-time", \
        "The same losses against the time that was spent training.")
    panel("throughput", "Throughput", "tokens", "zero", "tokens per second", "", "speed", "", \
        "Of all ranks together, since the previous report. Validations and checkpoints stop the clock.")
    panel("norm", "Gradient norm", "tokens", "fit", "norm", "", "norm", "", "The norm of the last commit before each report, before clipping.")
    panel("communication", "Communication", "tokens", "zero", "share of the time, %", "communication", "exposed", "", \
        "Of rank 0. Thick: exposed communication, during which nothing was computed. Thin: all communication; the difference was" \
        " hidden behind computation. The optimizer counts as communication where ranks share its work.")
    panel("rate", "Learning rate", "end", "zero", "learning rate", "", "rate", "future", "The learning rate of the same commits as the norm.")
    for (i = 1; i <= runs; i++) {
        print "<span>" badge(i) "</span>" > (to "/badges")
        print i, light[i], dark[i] > (to "/colours")
    }
}
