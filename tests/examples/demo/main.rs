//! A small storefront on the whole pipeline: `make demo`.
//!
//! Writers change prices in Postgres and invalidate the cached product in the same transaction. Readers in two regions read through their
//! region's Redis. Two relays and one subscriber per region run beside it as processes of their own. The demo counts, times and checks: a reader must
//! never be given a price older than one whose invalidation had been applied in its region before it asked. If one is, the demo fails.
//!
//! In reading order: [`storefront`] is the part for product teams, the whole of what a service does to read and write with Recant. [`ledger`]
//! decides what a stale read is, [`probe`] times propagation, [`load`] makes the traffic; [`stage`] and [`processes`] set everything up,
//! [`screen`] shows it.

mod http;
mod ledger;
mod load;
mod probe;
mod processes;
mod redis_client;
mod screen;
mod settings;
mod stage;
mod storefront;
mod tally;

use anyhow::Context as _;
use load::Load;
use processes::Processes;
use recant_schema::service::EXIT_CONFIGURATION;
use recant_schema::service::shutdown::Shutdown;
use screen::Screen;
use settings::Settings;
use stage::Stage;
use std::process::ExitCode;
use std::time::Duration;
use tally::Tally;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// How often the table is redrawn and the processes are looked at: a person reads no faster.
const REDRAW: Duration = Duration::from_millis(500);

/// What a shell reports for a process ended by Ctrl-C: 128 + SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

/// How a demo ended, when not with an error.
enum Ending {
    Good,
    Bad,
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    let settings = match Settings::load() {
        Ok(settings) => settings,
        Err(problems) => {
            for problem in problems.0 {
                eprintln!("demo: {problem}");
            }
            return ExitCode::from(EXIT_CONFIGURATION);
        }
    };
    match demonstrate(&settings).await {
        Ok(Ending::Good) => ExitCode::SUCCESS,
        Ok(Ending::Bad) => ExitCode::FAILURE,
        Ok(Ending::Interrupted) => ExitCode::from(EXIT_INTERRUPTED),
        Err(error) => {
            eprintln!("demo: {}", line(&error));
            ExitCode::FAILURE
        }
    }
}

/// What was attempted and why it failed. Libraries like to repeat their source in their own words; that is said once.
fn line(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

async fn demonstrate(settings: &Settings) -> anyhow::Result<Ending> {
    let shutdown = Shutdown::on_signals().context("could not listen for signals")?;
    let mut processes = Processes::none(settings).await?;
    let played = play(settings, &mut processes, &shutdown).await;
    if settings.keep && matches!(played, Ok(Ending::Good | Ending::Bad)) {
        screen::say_how_to_stop(&processes.leave_running());
        return played;
    }
    let stopped = processes.stop().await;
    let ending = played?;
    stopped?;
    Ok(ending)
}

/// Everything between the first process and the last line.
async fn play(settings: &Settings, processes: &mut Processes, shutdown: &Shutdown) -> anyhow::Result<Ending> {
    let stage = tokio::select! {
        stage = set_up(settings, processes) => stage?,
        () = shutdown.wait() => return Ok(Ending::Interrupted),
    };
    let tally = Tally::new();
    let mut load = Load::start(settings, &stage, &tally).await?;
    let mut screen = Screen::new(settings);
    let started = Instant::now();
    let mut redraw = interval(REDRAW);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Skip);
    while started.elapsed() < settings.duration {
        tokio::select! {
            _ = redraw.tick() => {}
            error = load.first_failure() => return Err(error),
            () = shutdown.wait() => return Ok(Ending::Interrupted),
        }
        if let Err(error) = processes.all_run() {
            // Ctrl-C reaches the processes too; that they end is no failure then.
            return if shutdown.requested() { Ok(Ending::Interrupted) } else { Err(error) };
        }
        processes.scrape(&tally).await;
        screen.draw(started.elapsed(), &tally);
    }
    load.stop().await?;
    let left_behind = load.settle(settings, &stage).await?;
    processes.scrape(&tally).await;
    screen.draw(started.elapsed(), &tally);
    let failures = tally.failures(&left_behind);
    screen.summarise(processes, settings, &stage, &tally, &failures);
    Ok(if failures.is_empty() { Ending::Good } else { Ending::Bad })
}

async fn set_up(settings: &Settings, processes: &mut Processes) -> anyhow::Result<Stage> {
    let stage = Stage::build(settings, processes).await?;
    processes.start(settings, &stage)?;
    processes.wait_until_ready().await?;
    Ok(stage)
}
