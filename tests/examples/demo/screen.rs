//! The live table, the line every five seconds where there is no terminal, and the summary.

use crate::processes::Processes;
use crate::settings::{REGIONS, Settings};
use crate::stage::Stage;
use crate::tally::{RegionTally, Tally};
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

/// How often a line is printed where a table cannot be redrawn.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Where the numbers appear.
pub(crate) struct Screen {
    duration: Duration,
    terminal: bool,
    /// Lines of the table that is on the screen.
    drawn: usize,
    next_line: Duration,
}

impl Screen {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self { duration: settings.duration, terminal: std::io::stdout().is_terminal(), drawn: 0, next_line: LINE_INTERVAL }
    }

    /// Shows where things stand.
    pub(crate) fn draw(&mut self, elapsed: Duration, tally: &Tally) {
        if self.terminal {
            let lines = self.table(elapsed, tally);
            let mut text = String::new();
            if self.drawn > 0 {
                // Up to the table's first line, in its first column.
                let _ = write!(text, "\x1b[{}F", self.drawn);
            }
            for line in &lines {
                // Each line takes the place of the older one, whose rest is erased.
                let _ = writeln!(text, "{line}\x1b[K");
            }
            self.drawn = lines.len();
            show(&text);
        } else if elapsed >= self.next_line {
            self.next_line += LINE_INTERVAL;
            show(&(one_line(elapsed, tally) + "\n"));
        }
    }

    /// Never wider than 80 columns: a line that wraps would be two, and the table would climb up the screen.
    fn table(&self, elapsed: Duration, tally: &Tally) -> Vec<String> {
        let seconds = elapsed.min(self.duration).as_secs();
        let mut lines = vec![
            String::new(),
            format!("Recant demo, second {seconds} of {}", self.duration.as_secs()),
            format!("{:<44}{:>14}{:>14}", "", REGIONS[0], REGIONS[1]),
        ];
        let mut row = |title: &str, cell: &dyn Fn(&RegionTally) -> String| {
            lines.push(format!("{title:<44}{:>14}{:>14}", cell(&tally.regions[0]), cell(&tally.regions[1])));
        };
        row("writes committed", &|_| thousands(tally.committed.get()));
        row("writes rolled back", &|_| thousands(tally.rolled_back.get()));
        row("invalidations applied (with probes)", &|region| thousands(region.applied.get()));
        row("propagation, before commit to applied, p50", &|region| time(region.propagation().map(|times| times.p50)));
        row("                                       p99", &|region| time(region.propagation().map(|times| times.p99)));
        row("                                       max", &|region| time(region.propagation().map(|times| times.max)));
        row("hits", &|region| thousands(region.hits.get()));
        row("misses", &|region| thousands(region.misses.get()));
        row("fills", &|region| thousands(region.fills.get()));
        row("fills refused", &|region| thousands(region.refused.get()));
        row("reads that could be judged", &|region| thousands(region.judged.get()));
        row("stale reads after the invalidation applied", &|region| thousands(region.stale.get()));
        lines
    }

    /// What came of it, and where to look next.
    pub(crate) fn summarise(&self, processes: &Processes, settings: &Settings, stage: &Stage, tally: &Tally, failures: &[String]) {
        let mut text = format!(
            "\n{} prices changed and {} changes rolled back in {} s.\n",
            thousands(tally.committed.get()),
            thousands(tally.rolled_back.get()),
            self.duration.as_secs()
        );
        for (name, region) in REGIONS.iter().zip(&tally.regions) {
            let _ = writeln!(
                text,
                "{name}: {} stale of {} judged reads; {} fills refused; {}",
                thousands(region.stale.get()),
                thousands(region.judged.get()),
                thousands(region.refused.get()),
                propagation(region),
            );
        }
        for failure in failures {
            let _ = writeln!(text, "FAILED  {failure}");
        }
        if failures.is_empty() {
            text += "Every cached price is the newest one, and nobody was given an older one after its invalidation.\n";
        }
        text += "\nLook next:\n";
        let _ = writeln!(text, "  a key      {}", inspect(processes, settings, stage));
        let when = if settings.keep { "" } else { "   (until the demo ends; KEEP=1 make demo keeps them)" };
        for (index, process) in processes.all.iter().enumerate() {
            let title = if index == 0 { "metrics" } else { "" };
            let _ =
                writeln!(text, "  {title:<10} http://{}/metrics   {}{}", process.address, process.name, if index == 0 { when } else { "" });
        }
        text += "  logs       .dev/demo/*.log\n";
        show(&text);
    }
}

/// The command for one key, to be pasted into a shell. The first product is the hottest.
fn inspect(processes: &Processes, settings: &Settings, stage: &Stage) -> String {
    let mut text = String::new();
    for (name, value) in stage.subscriber_environment(settings, 0) {
        // The ones without a default, and the prefix that makes the key one of its own.
        if ["SUBSCRIBER_REGION", "SUBSCRIBER_REDIS_URL", "SUBSCRIBER_BROKERS"].contains(&name) {
            let _ = write!(text, "{name}={value} ");
        }
    }
    text + &format!("{} inspect v2:demo:product:1", processes.binaries.join("subscriber").display())
}

/// After the summary of a demo with KEEP=1.
pub(crate) fn say_how_to_stop(pids: &[String]) {
    show(&format!("\nRelays and subscribers run on. Stop them: kill {}   (the next demo does, too)\n", pids.join(" ")));
}

fn one_line(elapsed: Duration, tally: &Tally) -> String {
    let mut text = format!("{:>3} s  {} writes", elapsed.as_secs(), thousands(tally.committed.get()));
    for (name, region) in REGIONS.iter().zip(&tally.regions) {
        let _ = write!(
            text,
            " | {name}: {} applied, {}, {} hits, {} misses, {} fills, {} refused, {} stale",
            thousands(region.applied.get()),
            propagation(region),
            thousands(region.hits.get()),
            thousands(region.misses.get()),
            thousands(region.fills.get()),
            thousands(region.refused.get()),
            thousands(region.stale.get())
        );
    }
    text
}

fn propagation(region: &RegionTally) -> String {
    match region.propagation() {
        None => "no probe has arrived".to_owned(),
        Some(times) => {
            let [p50, p99, max] = [times.p50, times.p99, times.max].map(|span| time(Some(span)));
            format!("propagation p50 {p50}, p99 {p99}, max {max} of {} probes", thousands(times.probes as u64))
        }
    }
}

fn time(span: Option<Duration>) -> String {
    match span.map(|span| span.as_secs_f64() * 1e3) {
        None => "-".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) => format!("{ms:.0} ms"),
    }
}

/// With a comma at every third digit.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A reader that went away (a closed pipe) is no failure.
fn show(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
