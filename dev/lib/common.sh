# Sourced by every script of dev/: where things lie, which ports are used, how a line is printed, the lock,
# and which engine (native processes or containers) carries the stack.
#
# Environment, all optional:
#   STACK                      native | containers; unset: the one that runs, else containers if an engine answers, else native
#   DEV_POSTGRES_PORT, DEV_KAFKA_PORT, DEV_KAFKA_CONTROLLER_PORT, DEV_REDIS_EU_PORT, DEV_REDIS_US_PORT
#   DEV_MIN_FREE_MB            refuse to start with less free disk space than this

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=$root/.dev       # git-ignored: data, logs, pid files, Kafka's jars
stack_file=$state/stack # exists while a stack is up: its engine and ports, as shell assignments

# 5xxxx: beside, not on, the servers' usual ports, so that a database of the machine's own stays untouched.
default_ports() {
  : "${DEV_POSTGRES_PORT:=55432}" "${DEV_KAFKA_PORT:=59092}" "${DEV_KAFKA_CONTROLLER_PORT:=59093}"
  : "${DEV_REDIS_EU_PORT:=56379}" "${DEV_REDIS_US_PORT:=56380}"
  export DEV_POSTGRES_PORT DEV_KAFKA_PORT DEV_KAFKA_CONTROLLER_PORT DEV_REDIS_EU_PORT DEV_REDIS_US_PORT
}

say() { printf '%s\n' "$*"; }
complain() { printf 'recant: %s\n' "$*" >&2; }
die() { complain "$@"; exit 1; }

# One caller at a time changes the stack; the others wait. Servers are started with descriptor 9 closed,
# otherwise the first server would hold the lock for its whole life.
lock_wait_s=900 # longer than a first start that installs packages on a slow line
take_lock() {
  mkdir -p "$state"
  command -v flock >/dev/null || return 0 # macOS: no native stack there, and compose itself is safe to run twice
  exec 9>"$state/lock"
  flock -n 9 && return
  say 'another make up, down or wipe is at work; waiting for it'
  flock -w "$lock_wait_s" 9 || die "$state/lock is still held after $lock_wait_s s; see who holds it: fuser $state/lock"
}

# Prints the servers' addresses as the services and the tests read them.
print_env() {
  say "export DATABASE_URL=postgres://recant:recant@127.0.0.1:$DEV_POSTGRES_PORT/recant"
  say "export KAFKA_BROKERS=127.0.0.1:$DEV_KAFKA_PORT"
  say "export REDIS_URL=redis://127.0.0.1:$DEV_REDIS_EU_PORT"
  say "export REDIS_URL_US=redis://127.0.0.1:$DEV_REDIS_US_PORT"
}

record_stack() { # ENGINE
  local name
  {
    say "engine=$1"
    for name in POSTGRES KAFKA KAFKA_CONTROLLER REDIS_EU REDIS_US; do
      name=DEV_${name}_PORT
      say "export $name=${!name}"
    done
  } >"$stack_file.new"
  mv "$stack_file.new" "$stack_file" # a reader sees the old file or the whole new one
}

# Sets engine and the ports of the stack that is up; false if none is recorded.
load_stack() {
  [[ -f $stack_file ]] || return 1
  # shellcheck source=/dev/null
  . "$stack_file"
}

# An engine that hangs (its daemon is starting or stopping) counts as none after 5 s.
engine_answers() {
  command -v docker >/dev/null || return 1
  if command -v timeout >/dev/null; then
    timeout 5 docker version >/dev/null 2>&1
  else
    docker version >/dev/null 2>&1
  fi
}

# A first start that failed, or a machine that was restarted, leaves a record of a stack of which nothing runs.
forget_stopped_stack() {
  [[ -f $stack_file ]] || return 0
  (load_stack && "${engine}_running") || rm -f "$stack_file"
}

# Sets engine and why from STACK, from the stack that is up, or from what this machine has.
choose_engine() {
  local wanted=${STACK:-} recorded='' ports_wanted ports_recorded
  ports_wanted="${DEV_POSTGRES_PORT:-},${DEV_KAFKA_PORT:-},${DEV_REDIS_EU_PORT:-},${DEV_REDIS_US_PORT:-}"
  case $wanted in
    '' | native | containers) ;;
    *) die "STACK=$wanted is not known; give STACK=native or STACK=containers" ;;
  esac
  forget_stopped_stack
  if [[ -f $stack_file ]]; then
    recorded=$(load_stack && say "$engine")
    ports_recorded=$(load_stack && say "$DEV_POSTGRES_PORT,$DEV_KAFKA_PORT,$DEV_REDIS_EU_PORT,$DEV_REDIS_US_PORT")
    if [[ $wanted && $wanted != "$recorded" ]]; then
      die "the stack is up as '$recorded'; 'make down' first, then STACK=$wanted"
    fi
    if [[ $ports_wanted != ,,, && $(default_ports && say "$DEV_POSTGRES_PORT,$DEV_KAFKA_PORT,$DEV_REDIS_EU_PORT,$DEV_REDIS_US_PORT") != "$ports_recorded" ]]; then
      die "the stack is up on other ports ($ports_recorded); 'make down' first"
    fi
    load_stack && why='as started before'
  elif [[ $wanted ]]; then
    engine=$wanted why="STACK=$wanted"
  elif engine_answers; then
    engine=containers why='a Docker engine answers; STACK=native for processes instead'
  else
    engine=native why='no Docker engine answers'
  fi
  require_engine
}

require_engine() {
  [[ $engine == native ]] || engine_answers ||
    die "no Docker engine answers ('docker version' fails); start it, or use STACK=native"
}
