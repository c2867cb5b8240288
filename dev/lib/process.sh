# Sourced: native servers as background processes with a pid file, a log and a readable death.
# A server NAME has .dev/pids/NAME (pid and start time, so that a pid used again by another process is not taken
# for it) and .dev/logs/NAME.log (the run before it: NAME.log.previous).

# Start time of a process in clock ticks since boot: field 22 of /proc/PID/stat, counted after the name in brackets.
start_time() { # PID
  local stat fields
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  read -r -a fields <<<"${stat##*) }"
  [[ ${fields[0]} != Z ]] || return 1 # a zombie has ended; only its parent has not noticed
  say "${fields[19]}"
}

# Prints the pid if the server of this name runs.
running_pid() { # NAME
  local pid='' started=''
  [[ -f $state/pids/$1 ]] || return 1
  read -r pid started <"$state/pids/$1" || return 1
  [[ $pid && $(start_time "$pid") == "$started" ]] || return 1
  say "$pid"
}

is_running() { running_pid "$1" >/dev/null; }
was_started() { [[ -f $state/pids/$1 ]]; }

log_of() { say "$state/logs/$1.log"; }

log_tail_lines=8 # enough for the cause and its context, few enough to read at a glance
show_log_tail() { # NAME
  [[ -s $(log_of "$1") ]] || return 0
  complain "the end of $(log_of "$1"):"
  tail -n "$log_tail_lines" "$(log_of "$1")" | cut -c1-200 | sed 's/^/  | /' >&2
}

# Starts a server in a session of its own: no terminal, not the caller's lock, its output in its log.
launch() { # NAME COMMAND...
  local name=$1 log pid started
  shift
  log=$(log_of "$name")
  mkdir -p "$state/pids" "$state/logs"
  [[ ! -e $log ]] || mv -f "$log" "$log.previous"
  : >"$log" || die "cannot write $log"
  setsid "$@" </dev/null >>"$log" 2>&1 9>&- &
  pid=$!
  disown "$pid"
  started=$(start_time "$pid") || started=0
  say "$pid $started" >"$state/pids/$name"
}

# Waits for a server that was just launched; a death or a silence ends the script with the end of the log.
await_ready() { # NAME DEADLINE_S PROBE...
  local name=$1 deadline=$2
  shift 2
  dead_or_ready() { ! is_running "$name" || "$@"; }
  wait_until "$deadline" dead_or_ready "$@" || true
  if ! is_running "$name"; then
    show_log_tail "$name"
    if grep -qi 'no space left' "$(log_of "$name")" 2>/dev/null; then die "$name stopped while starting: the disk is full"; fi
    die "$name stopped while starting; the end of its log is above"
  fi
  "$@" && return
  show_log_tail "$name"
  die "$name runs but did not answer within $deadline s; the end of its log is above"
}

# Says so when a server that was started has died since; then forgets it.
note_death() { # NAME
  was_started "$1" && ! is_running "$1" || return 0
  complain "$1 had died; starting it again"
  show_log_tail "$1"
  rm -f "$state/pids/$1"
}

signal_stop() { # NAME SIGNAL
  local pid
  pid=$(running_pid "$1") || return 0
  kill "-$2" "$pid" 2>/dev/null || true
}

has_stopped() { ! is_running "$1"; }

await_stop() { # NAME DEADLINE_S
  local pid
  if pid=$(running_pid "$1") && ! wait_until "$2" has_stopped "$1"; then
    complain "$1 (pid $pid) did not stop within $2 s and is killed"
    kill -KILL "$pid" 2>/dev/null || true
    wait_until 5 has_stopped "$1" || die "$1 (pid $pid) cannot be killed"
  fi
  rm -f "$state/pids/$1"
}
