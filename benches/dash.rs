//! What the dashboard costs: opening runs and drawing timelines.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use shardlab::dash::app::View;
use shardlab::dash::lanes::Lanes;
use shardlab::dash::state::Saved;
use shardlab::dash::theme::{Depth, Name, Theme};
use shardlab::dash::{App, Event, draw, update};
use shardlab_reports::store::Store;
use shardlab_reports::testing::view;
use std::hint::black_box;
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

/// A frame after a change of the window, in which everything is binned anew, and one in which nothing has changed.
fn redraw(c: &mut Criterion) {
    let mut group = c.benchmark_group("redraw");
    for spans in [20_000, 100_000] {
        let mut app = timeline(spans);
        let mut terminal =
            Terminal::new(TestBackend::new(160, 50)).expect("a test backend cannot fail");
        group.bench_function(BenchmarkId::new("zoomed", spans), |b| {
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

/// From the store's files to lanes that can be drawn.
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

criterion_group!(benches, redraw, open);
criterion_main!(benches);
