{{/* All pools as JSON by name, poolDefaults filled in. Sprig's own merges take a 0 or an empty list
for "not given". */}}
{{- define "shoal.pools" -}}
{{- $pools := dict -}}
{{- range $name, $given := .Values.pools -}}
  {{- $pool := deepCopy $.Values.poolDefaults -}}
  {{- range $key, $value := $given -}}
    {{- if has $key (list "resources" "nodeSelector" "annotations" "image") -}}
      {{- $value = merge (deepCopy $value) (get $pool $key | default dict) -}}
    {{- end -}}
    {{- $_ := set $pool $key $value -}}
  {{- end -}}
  {{- $_ := set $pool "minReplicas" (ternary $pool.minReplicas $pool.replicas (hasKey $pool "minReplicas")) -}}
  {{- $_ := set $pool "maxReplicas" (ternary $pool.maxReplicas $pool.replicas (hasKey $pool "maxReplicas")) -}}
  {{- $_ := set $pool "gpus" (ternary $pool.tensorParallelSize 0 (eq $pool.kind "gpu")) -}}
  {{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{/* "true" where a pool's size is not fixed. */}}
{{- define "shoal.autoscales" -}}
{{- range $name, $pool := include "shoal.pools" . | fromJson -}}
  {{- if lt $pool.minReplicas $pool.maxReplicas -}}true{{- end -}}
{{- end -}}
{{- end -}}
