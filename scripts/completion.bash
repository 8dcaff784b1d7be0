# completion.bash: in bash, the tab key completes train_gpt's commands, its options, and the values of
# options that list them. It asks the program itself, so it knows what that one knows.
_train_gpt() {
    local word=${COMP_WORDS[COMP_CWD]} before=${COMP_WORDS[COMP_CWD - 1]} words=''
    local rows
    rows=$("${COMP_WORDS[0]/#\~\//$HOME/}" help markdown 2> /dev/null | grep '^| `--') || return
    if [[ $before == --* ]]; then
        words=$(sed -nE "s/^\\| \`$before[ \`].*\\| ([a-z0-9_-]+(, [a-z0-9_-]+)* or [a-z0-9_-]+) \\| .*/\\1/p" <<< "$rows" | sed '/ or more$/d; s/ or /, /; s/,//g')
    elif [[ $word == -* ]]; then
        words=$(sed -nE 's/^\| `(--[A-Za-z0-9-]*).*/\1/p' <<< "$rows")
    elif [ "$COMP_CWD" = 1 ]; then
        words="train sample eval plan tokenize average export help"
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
}
complete -o default -F _train_gpt train_gpt
