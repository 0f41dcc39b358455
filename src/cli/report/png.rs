//! Renders plots as pictures.

/// Renders a standalone plot as PNG.
///
/// # Errors
/// Returns the reason if this build has no renderer or the plot cannot be rendered.
#[cfg(feature = "png")]
pub(super) fn render(svg: &str) -> Result<Vec<u8>, String> {
    use resvg::{tiny_skia, usvg};
    let mut options = usvg::Options::default();
    options.fontdb_mut().load_system_fonts();
    if options.fontdb.is_empty() {
        return Err("no fonts are installed on this machine, so labels cannot be drawn".to_owned());
    }
    // Any available font is used for sans-serif.
    let known = |family: &str| {
        let mut faces = options.fontdb.faces();
        faces.any(|f| f.families.iter().any(|(name, _)| name == family))
    };
    let usual = [
        "DejaVu Sans",
        "Liberation Sans",
        "Noto Sans",
        "Arial",
        "Helvetica",
    ];
    let first = options.fontdb.faces().next();
    let first = first.and_then(|f| f.families.first().map(|(name, _)| name.clone()));
    let family = usual
        .into_iter()
        .find(|f| known(f))
        .map(str::to_owned)
        .or(first);
    if let Some(family) = family {
        options.fontdb_mut().set_sans_serif_family(family);
    }
    let tree = usvg::Tree::from_str(svg, &options).map_err(|e| e.to_string())?;
    let size = tree.size().to_int_size();
    let mut picture =
        tiny_skia::Pixmap::new(size.width(), size.height()).ok_or("the plot has no size")?;
    picture.fill(tiny_skia::Color::WHITE);
    resvg::render(
        &tree,
        tiny_skia::Transform::identity(),
        &mut picture.as_mut(),
    );
    picture.encode_png().map_err(|e| e.to_string())
}

/// Fails, because this build cannot render pictures.
#[cfg(not(feature = "png"))]
pub(super) fn render(_: &str) -> Result<Vec<u8>, String> {
    Err("this binary was built without the feature `png`".to_owned())
}
