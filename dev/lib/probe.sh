# Sourced: how to see that a server really answers, from outside, without its command-line tools.
# Each probe_* is true once the server answers a request of its own protocol, and never takes longer than about 2 s.

port_open() { # PORT
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

# Who listens on the port, as far as this user may see it.
port_owner() { # PORT
  local line=''
  if command -v ss >/dev/null; then
    line=$(ss -ltnpH "sport = :$1" 2>/dev/null | sed -n 's/.*users:(("\([^"]*\)",pid=\([0-9]*\).*/\1, pid \2/p' | head -1)
  fi
  say "${line:-an unknown process}"
}

require_free_port() { # NAME PORT VARIABLE
  port_open "$2" || return 0
  die "port $2 for $1 is in use by $(port_owner "$2"); stop that, or give another port: $3=…"
}

probe_redis() { # PORT
  local reply=''
  { exec 3<>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null || return 1
  printf 'PING\r\n' >&3 2>/dev/null || true
  IFS= read -r -t 2 reply <&3 || true
  exec 3>&-
  [[ $reply == +PONG* ]]
}

# ApiVersions, version 0: length 10, key 18, version 0, correlation 1, no client name. The broker answers it
# once it takes requests; an open port alone comes seconds earlier.
probe_kafka() { # PORT
  local reply=0
  { exec 3<>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null || return 1
  printf '\0\0\0\x0a\0\x12\0\0\0\0\0\x01\xff\xff' >&3 2>/dev/null || true
  reply=$({ timeout 2 head -c 8 <&3 || true; } | wc -c)
  exec 3>&-
  [[ $reply -eq 8 ]]
}

# Postgres answers SSLRequest (length 8, code 80877103) with one byte as soon as its postmaster listens, so this
# tells "a Postgres is there"; that it takes queries is checked with psql where there is one (lib/postgres.sh).
probe_postgres() { # PORT
  local reply=''
  { exec 3<>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null || return 1
  printf '\0\0\0\x08\x04\xd2\x16\x2f' >&3 2>/dev/null || true
  IFS= read -r -n 1 -t 2 reply <&3 || true
  exec 3>&-
  [[ $reply == [SN] ]]
}

# Polls a probe until it is true, the process behind it is dead, or the time is over.
poll_interval=0.1 # seconds; far below what a person notices, far above what a probe costs
wait_until() { # DEADLINE_S COMMAND...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep "$poll_interval"
  done
}
