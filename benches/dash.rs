//! Measures the cost of the dashboard: opening runs and drawing timelines.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use shardlab::dash::app::View;
use shardlab::dash::event::Message;
use shardlab::dash::glance::Glance;
use shardlab::dash::lanes::Lanes;
use shardlab::dash::state::Saved;
use shardlab::dash::theme::{Depth, Name, Theme};
use shardlab::dash::{App, Event, Source, draw, update};
use shardlab::predict::{Profiles, predict};
use shardlab_plan::scenario;
use shardlab_reports::store::Store;
use shardlab_reports::testing::view;
use shardlab_sim::Options as SimOptions;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

fn timeline(spans: u32) -> App {
    let theme = Theme::new(Name::Dark, Depth::True);
    let (mut app, _) = App::new(Vec::new(), theme, &Saved::default());
    app.timeline
        .open(Arc::new(Lanes::new(Arc::new(view(spans)))));
    app.view = View::Timeline;
    app
}

fn press(app: &mut App, c: char) {
    let key = KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE);
    let _ = update(app, Event::Key(key));
}

/// Measures a redraw after a zoom, which recomputes all bins, and one without changes.
fn redraw(c: &mut Criterion) {
    let mut group = c.benchmark_group("redraw");
    for spans in [20_000, 100_000] {
        let mut app = timeline(spans);
        let mut terminal =
            Terminal::new(TestBackend::new(160, 50)).expect("a test backend cannot fail");
        group.bench_function(BenchmarkId::new("zoomed", spans), |b| {
            // Samples can have odd numbers of iterations: start each from the same window.
            press(&mut app, '0');
            let mut keys = "+-".chars().cycle();
            b.iter(|| {
                press(&mut app, keys.next().unwrap_or('+'));
                terminal
                    .draw(|frame| draw(&app, frame))
                    .expect("a test backend cannot fail");
            });
        });
        press(&mut app, '0');
        group.bench_function(BenchmarkId::new("unchanged", spans), |b| {
            b.iter(|| {
                terminal
                    .draw(|frame| draw(&app, frame))
                    .expect("a test backend cannot fail");
            });
        });
    }
    group.finish();
}

/// Measures how long it takes to read a saved run and to compute its lanes.
fn open(c: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Store::at(folder.path());
    let run = view(100_000);
    let id = store.save(&run).expect("the run is kept");
    let mut group = c.benchmark_group("open");
    group.sample_size(10);
    group.bench_function("stored 100000", |b| {
        b.iter(|| {
            let view = store.open(&id).expect("the run is there");
            black_box(Lanes::new(Arc::new(view)))
        });
    });
    let run = Arc::new(run);
    group.bench_function("lanes 100000", |b| {
        b.iter(|| black_box(Lanes::new(Arc::clone(&run))));
    });
    group.finish();
}

/// Measures the time from a changed option of the 8B scenario to the frame with its prediction:
/// loading, planning, simulating, explaining and drawing.
fn edit(c: &mut Criterion) {
    let profiles = Profiles::default();
    let name = "llama3-8b-4xh200";
    let source = Source::new(name.into(), name.into(), String::new());
    let theme = Theme::new(Name::Dark, Depth::True);
    let (mut app, _) = App::new(vec![source], theme, &Saved::default());
    let mut terminal =
        Terminal::new(TestBackend::new(160, 50)).expect("a test backend cannot fail");
    let mut values = (0..3).cycle();
    c.bench_function("edit llama3-8b-4xh200", |b| {
        b.iter(|| {
            let depth = values.next().unwrap_or(0);
            let set = [format!("fsdp.prefetch_forward={depth}")];
            let scenario = scenario::load(Path::new("llama3-8b-4xh200"), &set)
                .expect("the scenario is shipped");
            let prediction = predict(&scenario, &profiles, &SimOptions::default())
                .expect("the scenario can be predicted");
            let message = Message::Predicted {
                ticket: app.scenarios.ticket,
                base: None,
                now: Ok(Arc::new(Glance::of(&prediction))),
            };
            let _ = update(&mut app, Event::Message(message));
            terminal
                .draw(|frame| draw(&app, frame))
                .expect("a test backend cannot fail");
        });
    });
}

criterion_group!(benches, redraw, open, edit);
criterion_main!(benches);
