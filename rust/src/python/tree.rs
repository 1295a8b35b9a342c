//! `Index`: what `icecache.DciTree` is made of.

use super::arrays::{Array, dtype_named};
use super::errors::{interruptible, locked};
use crate::config::TreeOptions;
use crate::index::Index;
use crate::rows::Dtype;
use crate::tree::search::View;
use numpy::{PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Mutex;

#[pyclass(name = "Index", module = "icecache._icecache", frozen)]
pub struct PyIndex(Mutex<Index>);

#[pymethods]
impl PyIndex {
    #[new]
    fn new(
        dim: usize,
        page_size: usize,
        page_capacity: usize,
        fanout: usize,
        refine_passes: usize,
        scan_below: usize,
        summary_dtype: &str,
        seed: u64,
        num_threads: usize,
    ) -> PyResult<Self> {
        let options = TreeOptions {
            page_size,
            page_capacity,
            fanout,
            refine_passes,
            scan_below,
            summary_dtype: dtype_named(summary_dtype)?,
            seed,
        };
        Ok(Self(Mutex::new(Index::new(dim, options, num_threads)?)))
    }

    fn insert(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, dtype: &str) -> PyResult<()> {
        let keys = Array::new(keys, dtype)?;
        let keys = keys.heads()?;
        interruptible(py, &self.0, keys[0].len > 1, |index, cancelled| {
            index.insert(keys[0], cancelled)
        })
    }

    /// Fills `ids` and `scores`, [queries, k]; returns how many nodes and keys were scored.
    fn search(
        &self,
        py: Python<'_>,
        queries: &Bound<'_, PyAny>,
        dtype: &str,
        field_of_view: Vec<usize>,
        exact: bool,
        ids: &Bound<'_, PyArray2<i64>>,
        scores: &Bound<'_, PyArray2<f32>>,
    ) -> PyResult<(usize, usize)> {
        let queries = Array::new(queries, dtype)?;
        let queries = queries.heads()?[0];
        let (mut ids, mut scores) = (ids.try_readwrite()?, scores.try_readwrite()?);
        let (ids, scores) = (ids.as_slice_mut()?, scores.as_slice_mut()?);
        if ids.len() != scores.len() || ids.len() % queries.len.max(1) != 0 {
            return Err(PyValueError::new_err("ids and scores must be [queries, k]"));
        }
        let k = ids.len() / queries.len.max(1);
        let view = View(&field_of_view);
        let effort = interruptible(py, &self.0, queries.len > 1, |index, cancelled| {
            index.search(queries, k, view, exact, ids, scores, cancelled)
        })?;
        Ok((effort.nodes_scored, effort.keys_scored))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        locked(py, &self.0, |index| index.check())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        locked(py, &self.0, |index| Ok(index.len()))
    }

    #[getter]
    fn dtype(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        locked(py, &self.0, |index| Ok(index.dtype().map(Dtype::name)))
    }

    /// Bytes of the keys alone, bytes of everything, pages, nodes per level.
    fn stats(&self, py: Python<'_>) -> PyResult<(usize, usize, usize, Vec<usize>)> {
        locked(py, &self.0, |index| {
            let dtype = index.dtype().unwrap_or(Dtype::F32);
            let nodes = index.tree().map_or(Vec::new(), |tree| {
                tree.levels.iter().map(|level| level.len()).collect()
            });
            let keys = index.len() * index.dim() * dtype.bytes();
            Ok((
                keys,
                index.bytes(),
                nodes.first().copied().unwrap_or(0),
                nodes,
            ))
        })
    }
}
