//! Names and lengths of a matrix's buffers in a packed file.
//!
//! A matrix is named by the roles whose rows it holds, stacked, and its `band`-th format:
//! `layers.0.attention.q+k+v.0.int4` has the weights and `layers.0.attention.q+k+v.0.int4.steps` the scales of integer
//! formats.

use ferrule_kernels::{Format, PackedMatrix};

use super::error::LoadError;

/// Returns the name and the length in bytes of each buffer of a matrix, in the order of [`PackedMatrix::buffers`].
pub(super) fn buffers(
    name: &str,
    bands: &[(Format, usize)],
    columns: usize,
) -> Result<Vec<(String, usize)>, LoadError> {
    let mut buffers = Vec::with_capacity(2 * bands.len());
    for (band, &(format, rows)) in bands.iter().enumerate() {
        let [weights, steps] = PackedMatrix::buffer_bytes(format, rows, columns).ok_or_else(LoadError::too_large)?;
        let weights_name = weights_name(name, band, format);
        let steps_name = format!("{weights_name}.steps");
        buffers.extend([(weights_name, weights), (steps_name, steps)]);
    }
    Ok(buffers)
}

/// Returns the name of the buffer that holds the weights of a band.
pub(super) fn weights_name(name: &str, band: usize, format: Format) -> String {
    format!("{name}.{band}.{}", format.name())
}
