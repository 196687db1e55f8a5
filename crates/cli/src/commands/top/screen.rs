//! The terminal view: updates in intervals until q is pressed.

use std::io;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::widgets::{Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame};

use firn_api::StatusClient;
use firn_control::DaemonStatus;

use super::view::{HEAD, View};
use crate::output::plain;

/// Displays the status until q, Esc or Control-C.
pub(super) fn watch(
    endpoint: &str,
    client: &StatusClient,
    first: DaemonStatus,
    interval: Duration,
) -> io::Result<()> {
    let mut terminal = ratatui::try_init()?;
    let watched = draw_until_key(&mut terminal, endpoint, client, first, interval);
    ratatui::try_restore()?;
    watched
}

fn draw_until_key(
    terminal: &mut DefaultTerminal,
    endpoint: &str,
    client: &StatusClient,
    first: DaemonStatus,
    interval: Duration,
) -> io::Result<()> {
    let mut before = (first.clone(), Instant::now());
    let mut view = View::of(endpoint, None, first);
    let mut error = None;
    loop {
        terminal.draw(|frame| draw(frame, &view, error.as_deref()))?;
        let next = Instant::now() + interval;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            if !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let control_c = key.code == KeyCode::Char('c')
                        && key.modifiers.contains(KeyModifiers::CONTROL);
                    if control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                        return Ok(());
                    }
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &view, error.as_deref()))?;
                }
                _ => {}
            }
        }
        match client.status() {
            Ok(status) => {
                view = View::of(endpoint, Some(&before), status.clone());
                before = (status, Instant::now());
                error = None;
            }
            // Keeps the view: the daemon may be restarting.
            Err(failed) => error = Some(failed.to_string()),
        }
    }
}

/// Draws a view, and the error of the last update.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, error: Option<&str>) {
    let parts = [Constraint::Length(3), Constraint::Min(1)];
    let [top, rest] = Layout::vertical(parts).areas(frame.area());
    let [first, second] = view.summary().map(|line| plain(&line));
    let third = error.map(|error| plain(error).red()).unwrap_or_default();
    frame
        .render_widget(Paragraph::new(vec![first.bold().into(), second.into(), third.into()]), top);
    let rows = view.rows();
    // A column is as wide as its widest cell.
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        let widest = cells.chain([HEAD[column].chars().count()]).max().unwrap_or_default();
        Constraint::Length(u16::try_from(widest).unwrap_or(u16::MAX))
    };
    let widths: Vec<Constraint> = (0..HEAD.len()).map(width).collect();
    let rows = rows.into_iter().map(|row| Row::new(row.into_iter().map(|cell| plain(&cell))));
    let head = Row::new(HEAD).style(Style::new().bold());
    frame.render_widget(Table::new(rows, widths).header(head).column_spacing(2), rest);
}
